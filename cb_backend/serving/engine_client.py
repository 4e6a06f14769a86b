"""How a service reaches an engine: one interface, in this process or over the runner's URL.

Runs on the asyncio loop. RemoteClient is in remote_client.py.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

from cb_backend.core.sampling_params import SamplingParams
from cb_backend.core.step_io import ModelInfo, TokenEvent
from cb_backend.errors import EngineDeadError
from cb_backend.serving.metrics import EngineMetrics, RequestTimer

if TYPE_CHECKING:
    from cb_backend.serving.async_engine import AsyncEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """What a service submits. `request_id` is drawn by the engine's border, never by a client."""

    prompt_token_ids: list[int]
    params: SamplingParams
    cache_salt: str = ""
    priority: int = 0


@dataclass(frozen=True, slots=True)
class EngineHealth:
    ready: bool  # takes requests
    alive: bool  # false only when the engine is beyond use
    status: str  # for people


class EngineClient(Protocol):
    async def model_info(self) -> ModelInfo:
        """Raises EngineNotReadyError while the model loads, EngineDeadError once it is dead."""
        ...

    async def health(self) -> EngineHealth:
        """Never raises: an engine that does not answer is reported, in words."""
        ...

    def generate(self, request: GenerateRequest) -> AsyncIterator[TokenEvent]:
        """An async generator of the request's events, the last with a finish_reason.

        Raises InvalidRequestError, OverloadedError or EngineUnavailableError before the first
        event; RequestFailedError or EngineDeadError when the stream ends with an error. Closing
        the generator early aborts the request: its blocks are free within one step.
        """
        ...

    async def close(self) -> None: ...


class LocalClient:
    """An engine in this process. Closing the client leaves the engine to whoever made it."""

    def __init__(self, engine: AsyncEngine, metrics: EngineMetrics | None = None) -> None:
        self._engine = engine
        self._metrics = metrics

    async def model_info(self) -> ModelInfo:
        return self._engine.model_info()

    async def health(self) -> EngineHealth:
        return health_of(self._engine)

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenEvent]:
        timer = RequestTimer(self._metrics, time.monotonic()) if self._metrics else None
        events = cast("AsyncGenerator[TokenEvent, None]", self._engine.generate(request))
        async with aclosing(events):
            async for event in events:
                if timer is not None:
                    timer.observe(event)
                yield event

    async def close(self) -> None:
        pass


async def wait_until_ready(engine: EngineClient, *, limit_s: float = 600.0) -> ModelInfo:
    """Raises EngineDeadError when its model cannot be loaded, TimeoutError after `limit_s`."""
    async with asyncio.timeout(limit_s):
        while not (health := await engine.health()).ready:
            if not health.alive:
                raise EngineDeadError(health.status)
            await asyncio.sleep(0.05)
    return await engine.model_info()


def health_of(engine: AsyncEngine) -> EngineHealth:
    return EngineHealth(engine.is_ready, engine.is_alive, engine.status_text)
