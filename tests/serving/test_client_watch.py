"""A client that leaves: at any time, streaming or not, its engine request is aborted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from starlette.types import Message

from cb_backend.core.request import FinishReason
from cb_backend.serving import client_watch
from cb_backend.serving.client_watch import ClientLeftError, StreamResponse, run_while_connected
from tests.serving.conftest import Gate, Script, WatchedEngine, chat, completion, until, until_idle

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
LONG = "the quick brown fox " * 40


@asynccontextmanager
async def asking(
    http: aiohttp.ClientSession, body: dict[str, Any], path: str = CHAT
) -> AsyncIterator[asyncio.Task[aiohttp.ClientResponse]]:
    """A client that waits for its answer and leaves at the end of the block."""
    task = asyncio.create_task(http.post(path, json=body))
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_before_the_first_token_frees_its_blocks(
    wire_http: aiohttp.ClientSession, engine: WatchedEngine, script: Script, stream: bool
) -> None:
    script.before_step = gate = Gate()
    async with asking(wire_http, chat(stream=stream)):
        await until(gate.reached.is_set)
    await until(lambda: script.aborted == 1)  # it waits in the engine's inbox for the step's end
    gate.open()
    await until_idle(engine)
    assert engine.stats().finished == {FinishReason.ABORT: 1}


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_the_queue_is_never_computed(
    wire_http: aiohttp.ClientSession, engine: WatchedEngine, script: Script, stream: bool
) -> None:
    script.before_step = gate = Gate()
    async with asking(wire_http, chat("one", max_tokens=2)) as first:
        await until(gate.reached.is_set)
        async with asking(wire_http, chat("two", stream=stream)):
            await until(lambda: engine.num_live == 2)
        # Its abort has been sent once the gateway closed the connection's work.
        await until(lambda: script.aborted == 1)
        gate.open()
        await (await first).read()
    await until_idle(engine)
    stats = engine.stats()
    assert stats.finished == {FinishReason.ABORT: 1, FinishReason.LENGTH: 1}
    assert len({request_id for record in engine.step_log() for request_id, _ in record.rows}) == 1


async def test_a_client_that_leaves_in_the_middle_of_a_stream_is_aborted(
    wire_http: aiohttp.ClientSession, engine: WatchedEngine, script: Script
) -> None:
    script.say(LONG)
    gate = Gate()
    script.before_step = lambda plan: gate(plan) if engine.stats().generated_tokens >= 3 else None
    async with wire_http.post(CHAT, json=chat(stream=True)) as response:
        assert response.status == 200
        await response.content.readline()
        await until(gate.reached.is_set)
    await until(lambda: script.aborted == 1)
    gate.open()
    await until_idle(engine)
    assert engine.stats().finished == {FinishReason.ABORT: 1}
    assert engine.stats().generated_tokens < 20


async def test_a_client_that_leaves_takes_all_its_prompts_along(
    wire_http: aiohttp.ClientSession, engine: WatchedEngine, script: Script
) -> None:
    script.before_step = gate = Gate()
    body = completion(["one<|go|>", "two<|go|>", "three<|go|>"], stream=True)
    async with asking(wire_http, body, "/v1/completions"):
        await until(lambda: engine.num_live == 3)
    await until(lambda: script.aborted == 3)
    gate.open()
    await until_idle(engine)
    assert set(engine.stats().finished) == {FinishReason.ABORT}


async def test_the_next_request_after_a_cut_stream_gets_its_own_answer(
    wire_http: aiohttp.ClientSession, engine: WatchedEngine, script: Script
) -> None:
    for _ in range(50):
        async with wire_http.post(CHAT, json=chat(stream=True)) as response:
            await response.content.readline()
        async with wire_http.post(CHAT, json=chat()) as response:
            answer = await response.json()
        assert answer["choices"][0]["message"]["content"] == "the quick brown fox"
    await until_idle(engine)


async def test_headers_wait_for_the_first_token(
    wire_http: aiohttp.ClientSession, script: Script
) -> None:
    script.before_step = gate = Gate()
    async with asking(wire_http, chat(stream=True)) as answer:
        await until(gate.reached.is_set)
        assert not answer.done()
        gate.open()
        response = await answer
        assert response.status == 200
        assert b"[DONE]" in await response.read()


async def test_work_goes_on_while_the_client_stays() -> None:
    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def work() -> int:
        return 7

    assert await run_while_connected(receive, work()) == 7


async def test_work_is_closed_before_the_caller_hears_that_the_client_left() -> None:
    closed = False

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def work() -> None:
        nonlocal closed
        try:
            await asyncio.Event().wait()
        finally:
            closed = True

    with pytest.raises(ClientLeftError):
        await run_while_connected(receive, work())
    assert closed


async def test_a_client_that_takes_nothing_is_cut_and_the_stream_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_watch, "STALLED_CLIENT_S", 0.01)
    closed = False

    async def lines() -> AsyncGenerator[bytes, None]:
        nonlocal closed
        try:
            while True:
                yield b"x"
        finally:
            closed = True

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Message) -> None:
        if message.get("body"):
            await asyncio.Event().wait()

    rest = lines()
    await anext(rest)
    await StreamResponse(b"x", rest)({"type": "http"}, receive, send)
    assert closed


async def test_a_client_that_is_slow_but_takes_something_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_watch, "STALLED_CLIENT_S", 0.6)
    taken = []

    async def lines() -> AsyncGenerator[bytes, None]:
        for line in (b"1", b"2", b"3", b"4", b"5"):
            yield line

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Message) -> None:
        if message.get("body"):
            await asyncio.sleep(0.15)
            taken.append(message["body"])

    await StreamResponse(b"0", lines())({"type": "http"}, receive, send)
    assert taken == [b"0", b"1", b"2", b"3", b"4", b"5"]
