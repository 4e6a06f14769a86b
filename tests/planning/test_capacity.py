from __future__ import annotations

from dataclasses import replace

import pytest

from cb_backend.planning.capacity import (
    Prediction,
    Target,
    fewest_that_hold,
    percentiles,
    predict,
)
from cb_backend.planning.trace import Synthetic, Trace
from tests.planning.priced import SIMPLE, make_header


def two_at_once() -> Trace:
    """Two requests of 8 tokens and 3 of output, both at 10 s."""
    drawn = Synthetic(requests=2, prompt=(8, 8), output=(3, 3)).draw(4)
    return replace(
        drawn, requests=tuple((replace(arrival, time=10.0), end) for arrival, end in drawn.requests)
    )


def test_the_answer_is_the_one_that_is_computed_by_hand() -> None:
    # One replica: a step of 16 tokens, then two of 2. Two: a step of 8, then two of 1.
    one, two = (predict(two_at_once(), make_header(), SIMPLE, count) for count in (1, 2))
    assert one.ttft_s == pytest.approx({50: 9.0, 95: 9.0, 99: 9.0})
    assert one.itl_s == pytest.approx({50: 2.0, 95: 2.0, 99: 2.0})
    assert one.output_tokens_per_s == pytest.approx(6 / 13)
    assert one.total_tokens_per_s == pytest.approx(22 / 13)
    assert two.ttft_s == pytest.approx({50: 5.0, 95: 5.0, 99: 5.0})
    assert two.itl_s == pytest.approx({50: 1.5, 95: 1.5, 99: 1.5})
    assert two.output_tokens_per_s == pytest.approx(6 / 8)
    assert fewest_that_hold([one, two], Target(ttft_s=9.0, itl_s=2.0)) == 1
    assert fewest_that_hold([one, two], Target(ttft_s=8.9, itl_s=2.0)) == 2
    assert fewest_that_hold([one, two], Target(ttft_s=9.0, itl_s=1.9)) == 2
    assert fewest_that_hold([one, two], Target(ttft_s=4.9, itl_s=2.0)) is None


def test_a_replica_that_gets_nothing_changes_nothing() -> None:
    two, three = (predict(two_at_once(), make_header(), SIMPLE, count) for count in (2, 3))
    assert replace(three, num_replicas=2) == two


def test_percentiles_are_by_nearest_rank() -> None:
    assert percentiles([float(n) for n in range(100, 0, -1)]) == {50: 51.0, 95: 96.0, 99: 100.0}
    assert percentiles([]) == {50: 0.0, 95: 0.0, 99: 0.0}


def test_only_the_p95_must_hold() -> None:
    prediction = Prediction(1, {50: 1.0, 95: 2.0, 99: 9.0}, {50: 1.0, 95: 2.0, 99: 9.0}, 1.0, 1.0)
    assert prediction.holds(Target(2.0, 2.0))
    assert not prediction.holds(Target(1.9, 2.0))
    assert not prediction.holds(Target(2.0, 1.9))
