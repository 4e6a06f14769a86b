"""Gateway and runner over a real unix socket, with a real engine behind it."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path

import httpx
import pytest
from prometheus_client import CollectorRegistry

from cb_backend.core.request import FinishReason
from cb_backend.core.sampling_params import SamplingParams
from cb_backend.errors import (
    EngineNotReadyError,
    EngineUnavailableError,
    InvalidRequestError,
    PromptTooLongError,
    RequestFailedError,
)
from cb_backend.serving.engine_client import GenerateRequest
from cb_backend.serving.metrics import EngineMetrics
from cb_backend.serving.remote_client import RemoteClient
from cb_backend.serving.text_codec import TextCodec
from tests.serving.conftest import (
    CONTEXT,
    Gate,
    Script,
    WatchedEngine,
    chat,
    gateway,
    served,
    sse_objects,
    until,
    until_idle,
)
from tests.serving.remote import client_fixture, request_for, runner, tokens_of  # noqa: F401

pytestmark = pytest.mark.anyio


async def test_the_tokens_arrive_in_order_with_one_last_event(
    client: RemoteClient, script: Script
) -> None:
    events = [event async for event in client.generate(request_for(script))]
    tokens = [token for event in events for token in event.token_ids]
    assert tokens == [*script.token_ids, script.id_of("<|end|>")]
    assert [event.finish_reason for event in events[:-1]] == [None] * (len(events) - 1)
    assert events[-1].finish_reason is FinishReason.STOP


async def test_the_models_facts_cross_unchanged(
    client: RemoteClient, engine: WatchedEngine
) -> None:
    assert await client.model_info() == engine.model_info()


async def test_two_hundred_streams_at_once_do_not_mix(client: RemoteClient, script: Script) -> None:
    lengths = [n % 5 + 1 for n in range(200)]
    outputs = await asyncio.gather(
        *(tokens_of(client, request_for(script, max_tokens=n)) for n in lengths)
    )
    assert outputs == [[*script.token_ids, script.id_of("<|end|>")][:n] for n in lengths]


async def test_a_refusal_arrives_as_the_error_it_was(client: RemoteClient, script: Script) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        await tokens_of(client, GenerateRequest(prompt_token_ids=[9999], params=SamplingParams()))
    assert refused.value.field == "prompt"
    with pytest.raises(PromptTooLongError, match=str(CONTEXT)):
        await tokens_of(client, request_for(script, max_tokens=CONTEXT))
    assert await tokens_of(client, request_for(script))  # and the session lives on


async def test_a_failing_step_arrives_as_an_error_after_the_tokens(
    client: RemoteClient, engine: WatchedEngine, script: Script
) -> None:
    def fail_later(plan: object) -> None:
        if engine.stats().generated_tokens == 2:
            raise RuntimeError("the device is on fire")

    script.before_step = fail_later
    tokens: list[int] = []

    async def read() -> None:
        async for event in client.generate(request_for(script)):
            tokens.extend(event.token_ids)

    with pytest.raises(RequestFailedError):
        await read()
    assert tokens == script.token_ids[:2]


async def test_leaving_a_stream_aborts_it_in_the_engine(
    client: RemoteClient, engine: WatchedEngine, script: Script
) -> None:
    script.say("the quick brown fox " * 20)
    gate = Gate()
    script.before_step = lambda plan: gate(plan) if engine.stats().generated_tokens >= 3 else None
    async with aclosing(client.generate(request_for(script))) as events:  # type: ignore[type-var]
        await anext(events)
        await until(gate.reached.is_set)
    await until(lambda: script.aborted == 1)
    gate.open()
    await until_idle(engine)
    assert engine.stats().finished == {FinishReason.ABORT: 1}


async def test_a_reader_cancelled_before_the_first_token_aborts(
    client: RemoteClient, engine: WatchedEngine, script: Script
) -> None:
    script.before_step = gate = Gate()
    reader = asyncio.create_task(tokens_of(client, request_for(script)))
    await until(gate.reached.is_set)
    reader.cancel()
    await until(lambda: script.aborted == 1)
    gate.open()
    await until_idle(engine)
    assert engine.stats().finished == {FinishReason.ABORT: 1}


async def test_an_engine_that_is_not_there_yet_is_not_ready_but_alive(tmp_path: Path) -> None:
    client = RemoteClient(f"file://{tmp_path / 's'}")
    health = await client.health()
    assert (health.ready, health.alive) == (False, True)  # its process has not begun yet
    with pytest.raises(EngineUnavailableError):
        await client.model_info()
    async with served(runner(None).application(), tmp_path / "s"):
        health = await client.health()
        assert (health.ready, health.alive, health.status) == (False, True, "starting")
        with pytest.raises(EngineNotReadyError):
            await client.model_info()
    (tmp_path / "s").unlink()
    health = await client.health()
    assert (health.ready, health.alive) == (False, False)  # it was there, and is no more
    await client.close()


async def test_a_healthy_engine_says_so(client: RemoteClient) -> None:
    health = await client.health()
    assert (health.ready, health.alive, health.status) == (True, True, "ready")


async def test_a_draining_runner_ends_its_sessions_with_their_last_request(
    engine: WatchedEngine, script: Script, tmp_path: Path
) -> None:
    script.before_step = gate = Gate()
    routes = runner(engine, heartbeat_s=0.02)
    async with served(routes.application(), tmp_path / "s"):
        client = RemoteClient(f"file://{tmp_path / 's'}")
        reader = asyncio.create_task(tokens_of(client, request_for(script)))
        await until(gate.reached.is_set)
        routes.start_drain()
        gate.open()
        assert await reader == [*script.token_ids, script.id_of("<|end|>")]
        assert client._session is not None
        await asyncio.wait({client._session._reader}, timeout=10)
        assert client._session.has_ended
        await client.close()


async def test_a_gateway_over_a_runner_answers_as_one_in_process(
    client: RemoteClient, codec: TextCodec, script: Script
) -> None:
    script.say("客单价 👩‍👩‍👧 ď the fox")
    transport = httpx.ASGITransport(gateway(client, codec))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
        answers = await asyncio.gather(
            *(http.post("/v1/chat/completions", json=chat(stream=True)) for _ in range(20))
        )
    for answer in answers:
        pieces = [e["choices"][0]["delta"].get("content", "") for e in sse_objects(answer.text)]
        assert "".join(pieces) == "客单价 👩‍👩‍👧 ď the fox"


async def test_latencies_are_measured_once_per_request(
    engine: WatchedEngine, script: Script, tmp_path: Path
) -> None:
    registry = CollectorRegistry()
    routes = runner(engine)
    routes.metrics = EngineMetrics(registry)
    async with served(routes.application(), tmp_path / "s"):
        client = RemoteClient(f"file://{tmp_path / 's'}")
        for _ in range(3):
            await tokens_of(client, request_for(script, max_tokens=4))
        await client.close()
    for name, count in (
        ("cb_time_to_first_token_seconds", 3),
        ("cb_inter_token_latency_seconds", 9),
        ("cb_request_duration_seconds", 3),
    ):
        assert registry.get_sample_value(f"{name}_count") == count
