"""What an engine that fails or refuses looks like to a client of the routes."""

from __future__ import annotations

import json

import httpx
import pytest

from cb_backend.core.step_io import TokenEvent
from cb_backend.errors import (
    CBError,
    DeadlineError,
    EngineDeadError,
    EngineNotReadyError,
    OverloadedError,
    RequestFailedError,
)
from cb_backend.serving.gateway import Gateway
from cb_backend.serving.text_codec import TextCodec
from tests.serving.conftest import (
    Script,
    chat,
)
from tests.serving.fixed_engine import FixedEngine, answer_of

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "code", "has_retry_after"),
    [
        (OverloadedError("4096 wait, the limit is 4096"), 429, "overloaded", True),
        (DeadlineError("it would take 9 s"), 429, "deadline_unreachable", True),
        (EngineNotReadyError("loading"), 503, "engine_not_ready", True),
        (EngineDeadError("crashed"), 503, "engine_dead", True),
        (RequestFailedError("step 7 failed"), 500, "request_failed", False),
        (RuntimeError("/secret/path"), 500, "internal_error", False),
    ],
)
async def test_an_error_before_the_first_token_has_its_real_status(
    codec: TextCodec,
    stream: bool,
    error: Exception,
    status: int,
    code: str,
    has_retry_after: bool,
) -> None:
    response = await answer_of(FixedEngine([], error), codec, chat(stream=stream))
    assert response.status_code == status
    assert response.json()["error"]["code"] == code
    assert ("retry-after" in response.headers) == has_retry_after
    assert "/secret" not in response.text


@pytest.mark.parametrize(("seconds", "header"), [(0.2, "1"), (2.0, "2"), (7.01, "8")])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_refusal_says_in_whole_seconds_when_to_come_back(
    codec: TextCodec, stream: bool, seconds: float, header: str
) -> None:
    error = OverloadedError("too many wait", retry_after_s=seconds)
    response = await answer_of(FixedEngine([], error), codec, chat(stream=stream))
    assert response.status_code == 429
    assert response.headers["retry-after"] == header


@pytest.mark.parametrize("error", [EngineDeadError("the engine died"), RuntimeError("/secret/x")])
async def test_an_error_inside_a_stream_is_one_event_and_the_end(
    codec: TextCodec, script: Script, error: Exception
) -> None:
    token = TokenEvent("1", (script.token_ids[0],), step=1, time=0.0)
    response = await answer_of(FixedEngine([token], error), codec, chat(stream=True))
    assert response.status_code == 200
    *_, last = response.text.removesuffix("\n\n").split("\n\n")
    told = json.loads(last.removeprefix("data: "))
    assert set(told["error"]) == {"message", "type", "param", "code"}
    assert "[DONE]" not in response.text
    assert '"finish_reason":"' not in response.text
    assert "/secret" not in response.text
    if isinstance(error, CBError):
        assert told["error"]["message"] == error.message


async def test_a_gateway_without_a_model_yet_answers_503() -> None:
    transport = httpx.ASGITransport(Gateway(admin_key=None).application())
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
        response = await http.get("/v1/models")
    assert response.status_code == 503
