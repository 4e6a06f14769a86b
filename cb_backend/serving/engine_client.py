"""How a service reaches an engine: one interface, in this process or over the runner's URL.

Runs on the asyncio loop. RemoteClient is in remote_client.py.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from cb_backend.core.explain import RequestView
from cb_backend.core.sampling_params import SamplingParams
from cb_backend.core.step_io import ModelInfo, TokenEvent
from cb_backend.errors import EngineDeadError, InvalidRequestError
from cb_backend.serving import engine_controls
from cb_backend.serving.metrics import EngineMetrics, RequestTimer
from cb_backend.serving.token_stream import TokenStream

if TYPE_CHECKING:
    from cb_backend.serving.async_engine import AsyncEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """What a service submits. Request ids are drawn by the engine's border, never by a client."""

    prompt_token_ids: list[int]
    params: SamplingParams
    n: int = 1  # choices: as many answers to the one prompt, which is computed once
    cache_salt: str = ""
    priority: int = 0
    tenant: str = ""  # for whom; tenants share no cached prefixes
    deadline_s: float | None = None  # seconds from the arrival, for the whole answer
    pin_prefix_s: float | None = None  # seconds to keep the prompt in the prefix cache
    label: str = ""  # what the request ids begin with; need not be unique


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

    async def open(self, request: GenerateRequest) -> list[TokenStream]:
        """Submit; the stream of each of the request's choices. Read each to its end, or close it:
        that aborts the choice, and its blocks are free within one step.

        Raises InvalidRequestError or EngineUnavailableError; then nothing has been queued.
        Reading raises OverloadedError or DeadlineError first if the engine refuses the request,
        RequestFailedError or EngineDeadError when the stream ends with an error.
        """
        ...

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenEvent, None]:
        """The events of a request for one choice. Closing the generator early aborts it."""
        check_one_choice(request)
        (stream,) = await self.open(request)
        try:
            async for event in stream:
                yield event
        finally:
            await stream.aclose()

    async def live_requests(self) -> list[RequestView]:
        """Where each request stands: the running ones, then the queue in its order."""
        ...

    async def trace(self) -> bytes:
        """The last steps, as JSON that Perfetto and Chrome show."""
        ...

    async def use_policy(self, name: str) -> None:
        """Raises InvalidRequestError naming the policies that exist."""
        ...

    async def resize_kv_pool(self, num_blocks: int) -> None:
        """Raises InvalidRequestError for a size that cannot be."""
        ...

    async def close(self) -> None: ...


class LocalClient(EngineClient):
    """An engine in this process. Closing the client leaves the engine to whoever made it."""

    def __init__(self, engine: AsyncEngine, metrics: EngineMetrics | None = None) -> None:
        self._engine = engine
        self._metrics = metrics

    async def model_info(self) -> ModelInfo:
        return self._engine.model_info()

    async def health(self) -> EngineHealth:
        return health_of(self._engine)

    async def open(self, request: GenerateRequest) -> list[TokenStream]:
        streams = self._engine.open(request)
        if self._metrics is not None:
            for stream in streams:
                stream.on_event = RequestTimer(self._metrics, time.monotonic()).observe
        return streams

    async def live_requests(self) -> list[RequestView]:
        return await engine_controls.live_requests(self._engine)

    async def trace(self) -> bytes:
        return await engine_controls.trace(self._engine)

    async def use_policy(self, name: str) -> None:
        await engine_controls.use_policy(self._engine, name)

    async def resize_kv_pool(self, num_blocks: int) -> None:
        await engine_controls.resize_kv_pool(self._engine, num_blocks)

    async def close(self) -> None:
        pass


def check_one_choice(request: GenerateRequest) -> None:
    if request.n != 1:
        raise InvalidRequestError(
            f"generate brings one choice, n is {request.n}; open brings a stream for each",
            field="n",
        )


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
