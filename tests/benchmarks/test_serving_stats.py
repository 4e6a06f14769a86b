from __future__ import annotations

import pytest
from serving_client import Answer
from serving_stats import Limit, figures, figures_text, tpot_ms

LIMIT = Limit(ttft_ms=500.0, tpot_ms=100.0)


def answer(
    *chunk_times: float, due: float = 0.0, num_output: int = 3, error: str | None = None
) -> Answer:
    return Answer(due, list(chunk_times), 10, num_output, 4, True, error)


def test_the_time_per_token_is_shared_by_the_tokens_of_a_chunk() -> None:
    # Five tokens in three chunks: four gaps between the first and the last.
    assert tpot_ms(answer(1.0, 1.1, 1.4, num_output=5)) == pytest.approx(100.0)
    assert tpot_ms(answer(1.0, num_output=1)) is None


def test_figures_of_a_run() -> None:
    run = figures([answer(0.5, 0.6, 0.7), answer(1.4, 1.6, 2.0, due=1.0)], LIMIT)
    assert run["seconds"] == pytest.approx(2.0)
    assert run["requests_per_s"] == pytest.approx(1.0)
    assert run["output_tok_s"] == pytest.approx(3.0)
    assert run["total_tok_s"] == pytest.approx(13.0)
    assert run["cached_share"] == pytest.approx(0.4)
    assert run["ttft_ms"]["p50"] == pytest.approx(450.0)
    assert run["itl_ms"]["p50"] == pytest.approx(150.0)  # of 100, 100, 200 and 400
    assert run["e2e_ms"]["p99"] == pytest.approx(997.0)


@pytest.mark.parametrize(
    ("served", "good"),
    [
        (answer(0.5, 0.6, 0.7), True),
        (answer(0.6, 0.7, 0.8), False),
        (answer(0.1, 0.3, 0.4), False),
        (answer(0.5, num_output=1), True),
        (answer(0.1, 0.15, 0.2, error="cut off"), False),
    ],
    ids=["at both limits", "late", "slow", "one token", "failed"],
)
def test_goodput_counts_whole_answers_within_both_limits(served: Answer, good: bool) -> None:
    run = figures([served, answer(1.0, 2.0, 3.0)], LIMIT)  # the other one is neither
    assert bool(run["goodput_requests_per_s"]) is good


def test_a_failed_request_is_counted_and_in_no_other_figure() -> None:
    whole = answer(1.0, 1.1, 1.2)
    run = figures([whole, answer(5.0, 9.0, error="cut off"), answer(error="HTTP 429")], LIMIT)
    assert run["errors"] == {"cut off": 1, "HTTP 429": 1}
    assert run["requests"] == 3
    alone = figures([whole], LIMIT)
    assert {**run, "errors": {}, "requests": 1} == alone
    assert "1 of cut off, 1 of HTTP 429" in figures_text(run)


def test_a_run_in_which_all_fails_has_figures() -> None:
    run = figures([answer(error="HTTP 503")], LIMIT)
    assert run["output_tok_s"] == 0.0
    assert run["ttft_ms"] == {}
    assert "1 of HTTP 503" in figures_text(run)
