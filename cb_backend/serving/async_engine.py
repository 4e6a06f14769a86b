"""The engine's border: checks a request against every limit, and opens its stream.

`submit`, `abort` and the properties may be used from any thread; `generate` runs on an asyncio
loop, any number of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import TypeVar

from cb_backend.config import EngineConfig
from cb_backend.core.step_io import ModelInfo, TokenEvent
from cb_backend.engine.engine import Engine
from cb_backend.engine.engine_thread import EngineThread
from cb_backend.engine.lifecycle import EngineStatus
from cb_backend.engine.output_queue import Receiver
from cb_backend.engine.stats import EngineStats, StepRecord
from cb_backend.errors import EngineUnavailableError
from cb_backend.serving.checked_request import checked_requests
from cb_backend.serving.engine_client import GenerateRequest, check_one_choice
from cb_backend.serving.token_stream import LoopReceiver, TokenStream

T = TypeVar("T")


class AsyncEngine:
    """A running engine. Made by `factory.create_engine`, which starts its thread."""

    def __init__(self, config: EngineConfig, thread: EngineThread) -> None:
        self.config = config
        self._thread = thread
        self._last_stats = EngineStats()
        self._loops: dict[asyncio.AbstractEventLoop, _LoopStreams] = {}
        self._loops_lock = threading.Lock()  # each loop has a thread of its own

    @property
    def is_ready(self) -> bool:
        return self._thread.life.status is EngineStatus.READY

    @property
    def is_alive(self) -> bool:
        """False only when the engine is beyond use: its thread crashed, or a step hangs."""
        return not self._thread.life.is_dead

    @property
    def status_text(self) -> str:
        life = self._thread.life
        return life.status.name.lower() + (f": {life.error.message}" if life.error else "")

    def model_info(self) -> ModelInfo:
        """Raises EngineNotReadyError until the model is loaded, EngineDeadError after a crash."""
        return self._thread.engine.executor.model_info

    def stats(self) -> EngineStats:
        """Of a dead engine, the last that were seen: its counters must not seem to fall."""
        with contextlib.suppress(EngineUnavailableError):
            self._last_stats = self._thread.engine.stats()
        return self._last_stats

    def step_log(self) -> list[StepRecord]:
        """The last steps, oldest first."""
        return list(self._thread.engine.recorder.step_log)

    def submit(self, request: GenerateRequest, receiver: Receiver) -> list[str]:
        """Check, queue, and return the request ids of the choices, whose events go to `receiver`.

        Raises InvalidRequestError or EngineUnavailableError; then nothing has been queued. An
        overloaded engine refuses with a request's first event, which is then an error.
        """
        first, *forks = checked_requests(
            request,
            self.model_info(),
            now=time.monotonic(),
            prefix_caching=self.config.enable_prefix_caching,
        )
        self._thread.submit(first, receiver, forks)
        return [choice.request_id for choice in (first, *forks)]

    def open(self, request: GenerateRequest) -> list[TokenStream]:
        """Submit, and return the stream of each choice, to be read on the running loop.

        Raises what `submit` raises. Each stream must be read to its end or closed, which aborts.
        """
        streams = self._streams_of(asyncio.get_running_loop())
        request_ids = self.submit(request, streams.receiver)
        # Nothing can have come yet: events reach this loop through a callback.
        return [streams.open(request_id, self.abort) for request_id in request_ids]

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenEvent, None]:
        """The events of a request for one choice. Leaving early aborts it.

        Raises what `submit` raises before the first event, RequestFailedError or EngineDeadError
        when the stream ends with an error.
        """
        check_one_choice(request)
        (stream,) = self.open(request)
        try:
            async for event in stream:
                yield event
        finally:
            await stream.aclose()

    def abort(self, request_id: str) -> None:
        """End a request; its blocks are free before the next step. Unknown ids are ignored."""
        self._thread.abort(request_id)

    async def call(self, function: Callable[[Engine], T]) -> T:
        """`function(engine)`, run on the engine thread between two steps."""
        return await asyncio.wrap_future(self._thread.call(function))

    def start_drain(self) -> None:
        """Refuse new requests; the others may finish until drain_timeout_s is over."""
        self._thread.drain()

    def close(self) -> None:
        """Drain and wait for the engine thread to end. Blocks; may be called again."""
        self._thread.close()

    def _streams_of(self, loop: asyncio.AbstractEventLoop) -> _LoopStreams:
        with self._loops_lock:
            if loop not in self._loops:
                for known in [known for known in self._loops if known.is_closed()]:
                    del self._loops[known]
                self._loops[loop] = _LoopStreams(loop)
            return self._loops[loop]


class _LoopStreams:
    """The streams that are read on one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.receiver = LoopReceiver(loop, self._fan_out)
        self._by_id: dict[str, TokenStream] = {}

    def open(self, request_id: str, abort: Callable[[str], None]) -> TokenStream:
        """It is known here until its last event has come, read or not."""
        stream = self._by_id[request_id] = TokenStream(on_drop=lambda: abort(request_id))
        return stream

    def _fan_out(self, events: Sequence[TokenEvent]) -> None:
        for event in events:
            if (stream := self._by_id.get(event.request_id)) is None:
                continue
            stream.put(event)
            if event.finish_reason is not None:
                del self._by_id[event.request_id]
