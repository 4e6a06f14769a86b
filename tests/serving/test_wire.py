from __future__ import annotations

import json

import pytest

from cb_backend.core.request import FinishReason, RequestCost
from cb_backend.core.sampling_params import SamplingParams
from cb_backend.core.step_io import TokenEvent
from cb_backend.errors import ErrorInfo
from cb_backend.serving import wire
from cb_backend.serving.engine_client import EngineHealth, GenerateRequest
from tests.fakes import make_model_info

EVENTS = [
    TokenEvent("0", (5,), step=7, time=1.25),
    TokenEvent("1", (5, 6), step=7, time=1.25, num_cached_tokens=16),
    TokenEvent(
        "2",
        (9,),
        step=7,
        time=1.25,
        finish_reason=FinishReason.STOP,
        cost=RequestCost(0.25, 1.5, 2),
    ),
    TokenEvent("3", (9,), step=7, time=1.25, finish_reason=FinishReason.LENGTH),
    TokenEvent(
        "4",
        (),
        step=7,
        time=1.25,
        finish_reason=FinishReason.ERROR,
        error=ErrorInfo("overloaded", "too many\n— so", "prompt", retry_after_s=2.5),
    ),
]


def test_a_step_is_one_line_and_comes_back_whole() -> None:
    line = wire.encode_step(list(enumerate(EVENTS)))
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    assert wire.decode_step(line) == list(enumerate(EVENTS))


def test_a_heartbeat_is_a_step_of_nothing() -> None:
    assert wire.decode_step(wire.HEARTBEAT) == []


def test_a_plain_token_costs_few_bytes() -> None:
    line = wire.encode_step([(n, EVENTS[0]) for n in range(100)])
    assert len(line) < 100 * 12


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(
            temperature=0.5,
            top_p=0.9,
            top_k=5,
            min_p=0.1,
            presence_penalty=0.5,
            frequency_penalty=-0.5,
            repetition_penalty=1.5,
            logit_bias={3: -100.0, 0: 1.0},
            min_tokens=2,
            seed=-1,
            max_tokens=7,
            stop_token_ids=(1, 2),
            ignore_eos=True,
        ),
    ],
)
def test_a_submission_comes_back_whole(params: SamplingParams) -> None:
    request = GenerateRequest(
        prompt_token_ids=[1, 2, 3],
        params=params,
        n=3,
        cache_salt="客",
        priority=-2,
        tenant="a",
        deadline_s=1.5,
        pin_prefix_s=60.0,
        label="cmpl-1",
    )
    submission = wire.Submission("session", 3, request)
    sent = json.dumps(wire.encode_submission(submission))
    assert wire.decode_submission(json.loads(sent)) == submission


def test_the_models_facts_and_health_come_back_whole() -> None:
    info = make_model_info(eos_token_ids=(1, 2))
    assert wire.decode_model_info(wire.encode_model_info(info)) == info
    health = EngineHealth(False, True, "loading")
    assert wire.decode_health(wire.encode_health(health)) == health
    assert wire.decode_hello(wire.encode_hello("abc")) == "abc"
