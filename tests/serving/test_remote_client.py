"""Gateway and runner over a real unix socket, with a real engine behind it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from cb_backend.core.request import FinishReason
from cb_backend.core.sampling_params import SamplingParams
from cb_backend.errors import (
    EngineDeadError,
    EngineNotReadyError,
    EngineUnavailableError,
    InvalidRequestError,
    PromptTooLongError,
    RequestFailedError,
)
from cb_backend.serving import wire
from cb_backend.serving.client_watch import StreamResponse
from cb_backend.serving.engine_client import GenerateRequest
from cb_backend.serving.metrics import EngineMetrics
from cb_backend.serving.remote_client import RemoteClient
from cb_backend.serving.runner_app import RunnerRoutes
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

pytestmark = pytest.mark.anyio


def runner(engine: WatchedEngine | None, **settings: Any) -> RunnerRoutes:
    routes = RunnerRoutes(**settings)
    routes.engine = engine
    return routes


@pytest.fixture
async def client(engine: WatchedEngine, tmp_path: Path) -> AsyncIterator[RemoteClient]:
    path = tmp_path / "runner.sock"
    async with served(runner(engine).application(), path):
        client = RemoteClient(f"file://{path}", runner_name="EngineRunner")
        yield client
        await client.close()


def request_for(script: Script, text: str = "hi", **params: Any) -> GenerateRequest:
    prompt = script.tokenizer.encode(text + "<|go|>")
    return GenerateRequest(
        prompt_token_ids=prompt, params=SamplingParams(temperature=0.0, **params)
    )


async def tokens_of(client: RemoteClient, request: GenerateRequest) -> list[int]:
    return [token async for event in client.generate(request) for token in event.token_ids]


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


class SlowSubmits(RunnerRoutes):
    """Answers a submit only when told: the request is in the engine long before."""

    def __init__(self) -> None:
        super().__init__()
        self.submitted = asyncio.Event()
        self.may_answer = asyncio.Event()

    async def submit(self, request: Request) -> Response:
        response = await super().submit(request)
        self.submitted.set()
        await self.may_answer.wait()
        return response


async def test_events_that_overtake_the_submits_answer_are_kept(
    engine: WatchedEngine, script: Script, tmp_path: Path
) -> None:
    routes = SlowSubmits()
    routes.engine = engine
    async with served(routes.application(), tmp_path / "s"):
        client = RemoteClient(f"file://{tmp_path / 's'}")
        reader = asyncio.create_task(tokens_of(client, request_for(script)))
        await routes.submitted.wait()
        await until_idle(engine)
        routes.may_answer.set()
        assert await reader == [*script.token_ids, script.id_of("<|end|>")]
        await client.close()


async def test_a_reader_cancelled_during_the_submit_still_aborts(
    engine: WatchedEngine, script: Script, tmp_path: Path
) -> None:
    script.before_step = gate = Gate()
    routes = SlowSubmits()
    routes.engine = engine
    async with served(routes.application(), tmp_path / "s"):
        client = RemoteClient(f"file://{tmp_path / 's'}")
        reader = asyncio.create_task(tokens_of(client, request_for(script)))
        await routes.submitted.wait()
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
        routes.may_answer.set()
        await until(lambda: script.aborted == 1)
        gate.open()
        await until(lambda: engine.stats().finished == {FinishReason.ABORT: 1})
        await until_idle(engine)
        await client.close()


@pytest.mark.parametrize("lost", [wire.REQUESTS_PATH, wire.ABORT_PATH])
async def test_what_a_reader_has_left_ends_though_an_answer_is_lost(
    engine: WatchedEngine, script: Script, tmp_path: Path, lost: str
) -> None:
    script.before_step = gate = Gate()
    inner = runner(engine).application()
    submitted = asyncio.Event()

    async def losing(scope: Any, receive: Any, send: Any) -> None:
        """The request at `lost` breaks: a submit after it was taken, an abort before."""
        if scope.get("path") != lost:
            await inner(scope, receive, send)
        elif lost == wire.REQUESTS_PATH:
            await inner(scope, receive, lambda message: asyncio.sleep(0))
        if scope.get("path") == wire.REQUESTS_PATH:
            submitted.set()

    async with served(losing, tmp_path / "s"):
        client = RemoteClient(f"file://{tmp_path / 's'}")
        reader = asyncio.create_task(tokens_of(client, request_for(script)))
        await submitted.wait()
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
        await until(lambda: script.aborted == 1)
        gate.open()
        await until_idle(engine)
        await client.close()


async def test_a_gateway_that_goes_away_takes_its_requests_along(
    engine: WatchedEngine, script: Script, tmp_path: Path
) -> None:
    script.before_step = gate = Gate()
    async with served(runner(engine).application(), tmp_path / "s"):
        leaving = RemoteClient(f"file://{tmp_path / 's'}")
        staying = RemoteClient(f"file://{tmp_path / 's'}")
        lost = [asyncio.create_task(tokens_of(leaving, request_for(script))) for _ in range(3)]
        kept = asyncio.create_task(tokens_of(staying, request_for(script)))
        await until(lambda: engine.num_live == 4)
        await leaving.close()
        await until(lambda: script.aborted == 3)
        gate.open()
        assert await kept == [*script.token_ids, script.id_of("<|end|>")]
        for outcome in await asyncio.gather(*lost, return_exceptions=True):
            assert isinstance(outcome, EngineDeadError)
        await staying.close()
    await until_idle(engine)


async def test_a_runner_that_goes_away_ends_every_reader_and_a_new_one_is_used(
    engine: WatchedEngine, script: Script, tmp_path: Path
) -> None:
    script.before_step = gate = Gate()
    client = RemoteClient(f"file://{tmp_path / 's'}")
    async with served(runner(engine).application(), tmp_path / "s") as server:
        readers = [asyncio.create_task(tokens_of(client, request_for(script))) for _ in range(5)]
        await until(lambda: engine.num_live == 5)
        server.force_exit = True
        for connection in list(server.server_state.connections):
            connection.transport.abort()
        outcomes = await asyncio.gather(*readers, return_exceptions=True)
        assert all(isinstance(outcome, EngineDeadError) for outcome in outcomes)
    gate.open()
    (tmp_path / "s").unlink()
    with pytest.raises(EngineUnavailableError):
        await tokens_of(client, request_for(script))
    async with served(runner(engine).application(), tmp_path / "s"):
        assert await tokens_of(client, request_for(script))
        await client.close()


async def test_a_runner_that_falls_silent_ends_every_reader(script: Script, tmp_path: Path) -> None:
    async def silence() -> Any:
        yield wire.encode_hello("s")
        await asyncio.Event().wait()

    async def events(request: Request) -> Response:
        return StreamResponse(b"", silence())

    async def accept(request: Request) -> Response:
        return JSONResponse({"request_id": "1"})

    app = Starlette(
        routes=[
            Route(wire.EVENTS_PATH, events),
            Route(wire.REQUESTS_PATH, accept, methods=["POST"]),
        ]
    )
    async with served(app, tmp_path / "s"):
        client = RemoteClient(f"file://{tmp_path / 's'}", silence_limit_s=0.05)
        with pytest.raises(EngineDeadError, match="silent"):
            await tokens_of(client, request_for(script))
        await client.close()


async def test_heartbeats_keep_an_idle_session_alive(
    engine: WatchedEngine, script: Script, tmp_path: Path
) -> None:
    script.before_step = gate = Gate()
    async with served(runner(engine, heartbeat_s=0.02).application(), tmp_path / "s"):
        client = RemoteClient(f"file://{tmp_path / 's'}", silence_limit_s=0.3)
        reader = asyncio.create_task(tokens_of(client, request_for(script)))
        done, _ = await asyncio.wait({reader}, timeout=0.6)
        assert not done
        gate.open()
        assert await reader
        await client.close()


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
