"""Every cap: at it, just past it, and with values that are no numbers at all."""

from __future__ import annotations

import math
from typing import Any

import pytest

from cb_backend import limits
from cb_backend.core.sampling_params import SamplingParams
from cb_backend.errors import InvalidRequestError
from cb_backend.limits import NUMERIC_LIMITS, Limit


def just_below(limit: Limit) -> float:
    if limit.above:
        return limit.low
    return int(limit.low) - 1 if limit.integer else math.nextafter(limit.low, -math.inf)


def just_above(limit: Limit) -> float:
    return int(limit.high) + 1 if limit.integer else math.nextafter(limit.high, math.inf)


def at_low(limit: Limit) -> float:
    if limit.above:
        return math.nextafter(limit.low, math.inf)
    return int(limit.low) if limit.integer else limit.low


@pytest.mark.parametrize("limit", NUMERIC_LIMITS, ids=lambda limit: limit.field)
def test_a_value_at_the_cap_passes_and_one_past_it_is_refused(limit: Limit) -> None:
    limit.check(at_low(limit))
    limit.check(int(limit.high) if limit.integer else limit.high)
    for value in (just_below(limit), just_above(limit)):
        with pytest.raises(InvalidRequestError, match=f"^{limit.field} must be") as caught:
            limit.check(value)
        assert caught.value.field == limit.field
        assert limit.range_text in caught.value.message


@pytest.mark.parametrize("limit", NUMERIC_LIMITS, ids=lambda limit: limit.field)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, "1", None, True, [1], {}])
def test_what_is_no_finite_number_is_refused(limit: Limit, value: object) -> None:
    with pytest.raises(InvalidRequestError, match=f"^{limit.field} must be"):
        limit.check(value)


def test_a_long_wrong_value_is_cut_in_the_message() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        limits.TEMPERATURE.check("x" * 10_000)
    assert len(caught.value.message) < 200


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", 1.01),
        ("presence_penalty", -2.01),
        ("frequency_penalty", math.nan),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.inf),
        ("logit_bias", {1: -100.5}),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {"1": 1.0}),
        ("logit_bias", {True: 1.0}),
        ("logit_bias", dict.fromkeys(range(limits.MAX_LOGIT_BIASES + 1), 1.0)),
        ("min_tokens", -1),
        ("seed", 2**63),
        ("max_tokens", 0),
        ("max_tokens", True),
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", (1.0,)),
        ("stop_token_ids", tuple(range(limits.MAX_STOP_TOKEN_IDS + 1))),
    ],
)
def test_sampling_params_name_the_field_that_is_wrong(field: str, value: object) -> None:
    given: dict[str, Any] = {field: value}
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**given)
    assert caught.value.field == field
    assert field in caught.value.message


def test_an_answer_cannot_have_to_be_longer_than_it_may() -> None:
    SamplingParams(min_tokens=5, max_tokens=5)
    with pytest.raises(InvalidRequestError, match="which is 4, got 5") as caught:
        SamplingParams(min_tokens=5, max_tokens=4)
    assert caught.value.field == "min_tokens"


def test_sampling_params_take_every_value_at_its_cap() -> None:
    SamplingParams(
        temperature=100.0,
        top_p=1.0,
        top_k=-1,
        min_p=1.0,
        presence_penalty=-2.0,
        frequency_penalty=2.0,
        repetition_penalty=100.0,
        logit_bias=dict.fromkeys(range(limits.MAX_LOGIT_BIASES), -100.0),
        seed=-(2**63),
        max_tokens=1,
        stop_token_ids=tuple(range(limits.MAX_STOP_TOKEN_IDS)),
    )
