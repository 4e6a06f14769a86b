"""The runner's internal HTTP application: JSON only, for gateways. The runner's asyncio loop.

One stream of lines per gateway worker carries the events of all its requests, and its requests
live as long as it does: when the connection ends, they are aborted. So what a gateway that stops
reading can pile up is bounded by the time after which StreamResponse ends its connection.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from cb_backend.core.step_io import TokenEvent
from cb_backend.errors import CBError, EngineNotReadyError, EngineUnavailableError
from cb_backend.serving import engine_controls, wire
from cb_backend.serving.api_errors import status_of
from cb_backend.serving.async_engine import AsyncEngine
from cb_backend.serving.client_watch import StreamResponse
from cb_backend.serving.engine_client import EngineHealth, health_of
from cb_backend.serving.metrics import EngineMetrics, RequestTimer
from cb_backend.serving.token_stream import LoopReceiver

HEARTBEAT_S = 1.0
NDJSON = "application/x-ndjson"


class RunnerRoutes:
    """`engine` is set once the service has one; until then every route answers 503."""

    def __init__(self, *, heartbeat_s: float = HEARTBEAT_S) -> None:
        self.engine: AsyncEngine | None = None
        self.metrics: EngineMetrics | None = None
        self._heartbeat_s = heartbeat_s
        self._sessions: dict[str, _Session] = {}
        self._draining = False

    def application(self) -> Starlette:
        return Starlette(
            routes=[
                Route(wire.MODEL_PATH, self.model_info, methods=["GET"]),
                Route(wire.HEALTH_PATH, self.health, methods=["GET"]),
                Route(wire.EVENTS_PATH, self.events, methods=["GET"]),
                Route(wire.REQUESTS_PATH, self.submit, methods=["POST"]),
                Route(wire.ABORT_PATH, self.abort, methods=["POST"]),
                Route(wire.VIEWS_PATH, self.live_requests, methods=["GET"]),
                Route(wire.TRACE_PATH, self.trace, methods=["GET"]),
                Route(wire.POLICY_PATH, self.use_policy, methods=["POST"]),
                Route(wire.KV_POOL_PATH, self.resize_kv_pool, methods=["POST"]),
            ],
            exception_handlers={CBError: _on_cb_error},
        )

    def start_drain(self) -> None:
        """End each session with its last request: an open one would keep the server from ending."""
        self._draining = True

    async def model_info(self, request: Request) -> Response:
        return JSONResponse(wire.encode_model_info(self._engine().model_info()))

    async def health(self, request: Request) -> Response:
        health = (
            EngineHealth(ready=False, alive=True, status="starting")
            if self.engine is None
            else health_of(self.engine)
        )
        return JSONResponse(wire.encode_health(health))

    async def events(self, request: Request) -> Response:
        return StreamResponse(b"", self._lines(self._engine()), media_type=NDJSON)

    async def submit(self, request: Request) -> Response:
        submission = wire.decode_submission(await _json_of(request))
        session = self._sessions.get(submission.session)
        if session is None:
            raise EngineUnavailableError("this session has ended; open another one")
        session.submit(submission)
        return JSONResponse({})

    async def abort(self, request: Request) -> Response:
        data = await _json_of(request)
        session = self._sessions.get(data["session"])
        if session is not None:
            session.abort(data["tag"])
        return JSONResponse({})

    async def live_requests(self, request: Request) -> Response:
        views = await engine_controls.live_requests(self._engine())
        return JSONResponse(wire.encode_views(views))

    async def trace(self, request: Request) -> Response:
        content = await engine_controls.trace(self._engine())
        return Response(content, media_type="application/json")

    async def use_policy(self, request: Request) -> Response:
        data = await _json_of(request)
        await engine_controls.use_policy(self._engine(), data["policy"])
        return JSONResponse({})

    async def resize_kv_pool(self, request: Request) -> Response:
        data = await _json_of(request)
        await engine_controls.resize_kv_pool(self._engine(), data["num_blocks"])
        return JSONResponse({})

    async def _lines(self, engine: AsyncEngine) -> AsyncGenerator[bytes, None]:
        session = _Session(engine, self.metrics, self._heartbeat_s)
        self._sessions[session.id] = session
        try:
            yield wire.encode_hello(session.id)
            while not (self._draining and session.is_idle):
                await session.has_unsent.wait()
                yield session.take()
        finally:
            del self._sessions[session.id]
            session.close()

    def _engine(self) -> AsyncEngine:
        if self.engine is None:
            raise EngineNotReadyError("the runner is starting")
        return self.engine


class _Session:
    """The requests of one gateway worker. All of it happens on the loop."""

    def __init__(
        self, engine: AsyncEngine, metrics: EngineMetrics | None, heartbeat_s: float
    ) -> None:
        self.id = uuid.uuid4().hex
        self.has_unsent = asyncio.Event()
        self._engine = engine
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self._receiver = LoopReceiver(self._loop, self._on_step)
        self._heartbeat_s = heartbeat_s
        self._next_beat = self._loop.call_later(heartbeat_s, self._beat)
        self._tags: dict[str, int] = {}  # of live requests, by request id
        self._request_ids: dict[int, str] = {}
        self._timers: dict[str, RequestTimer] = {}
        self._unsent: list[bytes] = []

    @property
    def is_idle(self) -> bool:
        return not self._tags and not self._unsent

    def submit(self, submission: wire.Submission) -> None:
        submitted = time.monotonic()
        request_ids = self._engine.submit(submission.request, self._receiver)
        # Events come to this loop through a callback, so none can be here before the next lines.
        for tag, request_id in enumerate(request_ids, submission.tag):
            self._tags[request_id] = tag
            self._request_ids[tag] = request_id
            if self._metrics is not None:
                self._timers[request_id] = RequestTimer(self._metrics, submitted)

    def abort(self, tag: int) -> None:
        """Its last event still goes out: it tells what the request took."""
        request_id = self._request_ids.get(tag)
        if request_id is not None:
            self._engine.abort(request_id)

    def take(self) -> bytes:
        lines, self._unsent = self._unsent, []
        self.has_unsent.clear()
        return b"".join(lines)

    def close(self) -> None:
        self._next_beat.cancel()
        for tag in list(self._request_ids):
            self.abort(tag)

    def _on_step(self, events: Sequence[TokenEvent]) -> None:
        tagged: list[tuple[int, TokenEvent]] = []
        for event in events:
            if (tag := self._tags.get(event.request_id)) is None:
                continue  # its submit raised half-way: the gateway knows nothing of it
            tagged.append((tag, event))
            if (timer := self._timers.get(event.request_id)) is not None:
                timer.observe(event)
            if event.finish_reason is not None:
                self._forget(event.request_id)
        if tagged:
            self._send(wire.encode_step(tagged))

    def _beat(self) -> None:
        """Whether there are steps or not: a timer for each wait would cost each step one."""
        self._send(wire.HEARTBEAT)
        self._next_beat = self._loop.call_later(self._heartbeat_s, self._beat)

    def _send(self, line: bytes) -> None:
        self._unsent.append(line)
        self.has_unsent.set()

    def _forget(self, request_id: str) -> None:
        del self._request_ids[self._tags.pop(request_id)]
        self._timers.pop(request_id, None)


async def _json_of(request: Request) -> dict[str, Any]:
    data = json.loads(await request.body())
    assert isinstance(data, dict)
    return data


async def _on_cb_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, CBError)
    return JSONResponse(wire.encode_error(error.info()), status_of(error))
