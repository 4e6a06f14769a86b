"""How a text ends through the routes: stop tokens, stop strings, half a character."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from cb_backend.core.request import FinishReason
from cb_backend.core.step_io import TokenEvent
from cb_backend.serving.async_engine import AsyncEngine
from cb_backend.serving.text_codec import TextCodec
from tests.serving.conftest import (
    Gate,
    Script,
    chat,
    completion,
    sse_objects,
    until,
    until_idle,
)
from tests.serving.fixed_engine import FixedEngine, answer_of
from tests.serving.routes import CHAT, COMPLETIONS, stream_of, text_of, whole

pytestmark = pytest.mark.anyio


async def test_a_stop_token_id_ends_the_answer_and_is_not_shown(
    http: httpx.AsyncClient, script: Script
) -> None:
    stop_id = script.token_ids[2]
    answer = await whole(http, COMPLETIONS, completion(stop_token_ids=[stop_id]))
    assert answer["choices"][0]["text"] == script.tokenizer.decode(script.token_ids[:2])
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("stop", ["brown", "k br", ["nope", "ick"], "the quick brown fox", "t"])
async def test_a_stop_string_cuts_to_the_character_streamed_or_not(
    http: httpx.AsyncClient, stop: str | list[str]
) -> None:
    text = "the quick brown fox"
    expected = text[
        : min(text.find(s) for s in ([stop] if isinstance(stop, str) else stop) if s in text)
    ]
    answer = await whole(http, CHAT, chat(stop=stop))
    events = await stream_of(http, CHAT, chat(stop=stop))
    assert answer["choices"][0]["message"]["content"] == expected
    assert text_of(events) == expected
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert events[-1]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(("min_tokens", "expected"), [(0, "a "), (1, "a "), (2, "a b a ")])
async def test_a_stop_string_within_the_first_tokens_is_text(
    http: httpx.AsyncClient, script: Script, min_tokens: int, expected: str
) -> None:
    assert len(script.say("a b a b")) == 5, "the stop string is whole with the second token"
    body = chat(stop="b", min_tokens=min_tokens)
    answer = await whole(http, CHAT, body)
    assert answer["choices"][0]["message"]["content"] == expected
    assert text_of(await stream_of(http, CHAT, body)) == expected


async def test_a_stop_string_ends_the_request_in_the_engine(
    http: httpx.AsyncClient, engine: AsyncEngine, script: Script
) -> None:
    script.say("the quick brown fox " * 20)
    gate = Gate()
    script.before_step = lambda plan: gate(plan) if engine.stats().generated_tokens >= 9 else None
    asked = asyncio.create_task(whole(http, CHAT, chat(stop=" quick")))
    await until(lambda: script.aborted == 1)
    gate.open()
    answer = await asked
    used = answer["usage"]["completion_tokens"]
    assert script.tokenizer.decode(script.token_ids[:used]).endswith(" quick")
    await until_idle(engine)
    assert engine.stats().finished.get(FinishReason.ABORT) == 1


async def test_text_held_back_for_a_stop_string_comes_at_the_end(http: httpx.AsyncClient) -> None:
    events = await stream_of(http, CHAT, chat(stop=["foxZZZ", "xY"]))
    assert text_of(events) == "the quick brown fox"
    assert events[-1]["choices"][0]["finish_reason"] == "stop"


async def test_a_stop_string_that_never_begins_delays_nothing(
    codec: TextCodec, script: Script
) -> None:
    events = [
        TokenEvent("1", (token_id,), step=step, time=0.0)
        for step, token_id in enumerate(script.token_ids)
    ]
    events.append(TokenEvent("1", (), step=9, time=0.0, finish_reason=FinishReason.LENGTH))
    bodies = [chat(stream=True), chat(stream=True, stop="QQQQQQQQQQQQ")]
    plain, stopped = [
        sse_objects((await answer_of(FixedEngine(events), codec, body)).text) for body in bodies
    ]
    assert len(plain) == len(events) + 1  # an opening, a chunk for each token, and the end
    assert [e["choices"][0]["delta"] for e in plain] == [e["choices"][0]["delta"] for e in stopped]


async def test_bytes_cut_in_the_middle_of_a_character_are_counted_and_shown_as_such(
    http: httpx.AsyncClient, script: Script
) -> None:
    script.token_ids = script.bytes_of("😀😀".encode())
    for max_tokens, text in ((1, "\ufffd"), (4, "😀"), (6, "😀\ufffd")):
        answer = await whole(http, CHAT, chat(max_tokens=max_tokens))
        assert answer["choices"][0]["message"]["content"] == text
        assert answer["usage"]["completion_tokens"] == max_tokens
        assert text_of(await stream_of(http, CHAT, chat(max_tokens=max_tokens))) == text
