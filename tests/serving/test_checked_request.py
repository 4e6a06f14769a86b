"""What a submission becomes: a request for each choice, within every limit."""

from __future__ import annotations

import math
from typing import Any

import pytest

from cb_backend import limits
from cb_backend.core.request import Request
from cb_backend.core.sampling_params import SamplingParams
from cb_backend.errors import InvalidRequestError
from cb_backend.serving.checked_request import checked_requests
from cb_backend.serving.engine_client import GenerateRequest
from tests.fakes import VOCAB_SIZE, make_model_info

NOW = 100.0


def checked(
    *, prefix_caching: bool = True, params: SamplingParams | None = None, **fields: Any
) -> list[Request]:
    params = params or SamplingParams(max_tokens=4)
    request = GenerateRequest(prompt_token_ids=[1, 2, 3], params=params, **fields)
    return checked_requests(request, make_model_info(), now=NOW, prefix_caching=prefix_caching)


def test_the_first_choice_is_the_parent_of_all_others() -> None:
    first, *others = checked(n=4)
    assert first.fork_of is None
    assert [other.fork_of for other in others] == [first.request_id] * 3
    assert len({choice.request_id for choice in [first, *others]}) == 4
    assert {tuple(choice.token_ids) for choice in [first, *others]} == {(1, 2, 3)}


def test_each_choice_has_its_own_list_of_tokens() -> None:
    first, second = checked(n=2)
    first.token_ids.append(9)
    assert second.token_ids == [1, 2, 3]


def test_a_seed_gives_a_set_of_seeds_that_differ_and_can_be_had_again() -> None:
    seeds = [choice.seed for choice in checked(n=4, params=SamplingParams(seed=5))]
    assert seeds == [choice.seed for choice in checked(n=4, params=SamplingParams(seed=5))]
    assert seeds[0] == 5, "as it is without n"
    assert len(set(seeds)) == 4


def test_the_largest_seed_has_choices_too() -> None:
    for choice in checked(n=16, params=SamplingParams(seed=limits.INT64_MAX)):
        limits.SEED.check(choice.seed)


def test_without_a_seed_all_choices_draw_their_own() -> None:
    assert len({choice.seed for _ in range(2) for choice in checked(n=4)}) == 8


def test_a_deadline_counts_from_the_arrival() -> None:
    assert [choice.deadline for choice in checked(n=2, deadline_s=2.5)] == [NOW + 2.5] * 2
    assert checked()[0].deadline == math.inf


def test_a_prefix_is_pinned_once() -> None:
    assert [choice.pin_s for choice in checked(n=3, pin_prefix_s=60.0)] == [60.0, 0.0, 0.0]


def test_a_pin_without_a_prefix_cache_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="enable_prefix_caching") as refused:
        checked(pin_prefix_s=60.0, prefix_caching=False)
    assert refused.value.field == "pin_prefix_s"


def test_no_two_tenants_share_a_salt_whatever_they_call_themselves() -> None:
    pairs = [
        (tenant, salt)
        for tenant in ("", "a", "a.b", "a-b")
        for salt in ("", "a", "/", "a/", "/a", "a/a", "b", ".b")
    ]
    salts = {
        checked(tenant=tenant, cache_salt=salt)[0].cache_salt: (tenant, salt)
        for tenant, salt in pairs
    }
    assert sorted(salts.values()) == sorted(pairs)


def test_a_label_begins_the_ids_and_need_not_be_unique() -> None:
    ids = [choice.request_id for _ in range(2) for choice in checked(n=2, label="chatcmpl-x")]
    assert len(set(ids)) == 4
    assert {request_id.rpartition("-")[0] for request_id in ids} == {"chatcmpl-x"}


def test_the_least_length_is_held_against_what_is_left_of_the_context() -> None:
    left = make_model_info().max_model_len - 3
    assert checked(params=SamplingParams(min_tokens=left))[0].max_tokens == left
    with pytest.raises(InvalidRequestError, match=f"which is {left}") as refused:
        checked(params=SamplingParams(min_tokens=left + 1))
    assert refused.value.field == "min_tokens"


@pytest.mark.parametrize("field", ["stop_token_ids", "logit_bias"])
def test_a_token_id_past_the_vocabulary_is_named(field: str) -> None:
    for token_id, is_known in ((VOCAB_SIZE - 1, True), (VOCAB_SIZE, False)):
        value = {token_id: 1.0} if field == "logit_bias" else (token_id,)
        given: dict[str, Any] = {field: value}
        params = SamplingParams(**given)
        if is_known:
            assert checked(params=params)
            continue
        with pytest.raises(InvalidRequestError, match=f"{field} has the token id {token_id}"):
            checked(params=params)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("n", 17),
        ("n", 1.0),
        ("tenant", "x" * (limits.MAX_TENANT_CHARS + 1)),
        ("tenant", "a/b"),
        ("tenant", "a b"),
        ("tenant", "a\n"),
        ("tenant", "ü"),
        ("tenant", "a,b"),
        ("tenant", "a=b"),
        ("label", "x" * (limits.MAX_LABEL_CHARS + 1)),
        ("label", "a/b"),
        ("deadline_s", 0.0),
        ("deadline_s", math.inf),
        ("deadline_s", 86_401),
        ("pin_prefix_s", -1.0),
        ("pin_prefix_s", 86_401),
    ],
)
def test_a_field_out_of_its_limits_is_named(field: str, value: object) -> None:
    with pytest.raises(InvalidRequestError, match=f"^{field} ") as refused:
        checked(**{field: value})
    assert refused.value.field == field
