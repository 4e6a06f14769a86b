"""One connection and the requests on it: lost answers, lost ends, silence."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from cb_backend.core.request import FinishReason
from cb_backend.errors import (
    EngineDeadError,
    EngineUnavailableError,
)
from cb_backend.serving import wire
from cb_backend.serving.client_watch import StreamResponse
from cb_backend.serving.remote_client import RemoteClient
from cb_backend.serving.runner_app import RunnerRoutes
from tests.serving.conftest import (
    Gate,
    Script,
    WatchedEngine,
    served,
    until,
    until_idle,
)
from tests.serving.remote import client_fixture, request_for, runner, tokens_of  # noqa: F401

pytestmark = pytest.mark.anyio


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
