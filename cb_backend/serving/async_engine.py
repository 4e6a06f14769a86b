"""The engine's border: checks a request against every limit, and opens its stream.

`submit`, `abort` and the properties may be used from any thread; `generate` runs on an asyncio
loop, any number of them.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TypeVar

from cb_backend import limits
from cb_backend.config import EngineConfig
from cb_backend.core.request import Request
from cb_backend.core.step_io import ModelInfo, TokenEvent
from cb_backend.engine.engine import Engine
from cb_backend.engine.engine_thread import EngineThread
from cb_backend.engine.lifecycle import EngineStatus
from cb_backend.engine.output_queue import Receiver
from cb_backend.engine.stats import EngineStats, StepRecord
from cb_backend.errors import EngineUnavailableError, InvalidRequestError, PromptTooLongError
from cb_backend.serving.engine_client import GenerateRequest
from cb_backend.serving.token_stream import LoopReceiver, TokenStream

T = TypeVar("T")


class AsyncEngine:
    """A running engine. Made by `factory.create_engine`, which starts its thread."""

    def __init__(self, config: EngineConfig, thread: EngineThread) -> None:
        self.config = config
        self._thread = thread
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
        try:
            return self._thread.engine.stats()
        except EngineUnavailableError:
            return EngineStats()

    def step_log(self) -> list[StepRecord]:
        """The last steps, oldest first."""
        return list(self._thread.engine.recorder.step_log)

    def submit(self, request: GenerateRequest, receiver: Receiver) -> str:
        """Check, queue, and return the request id under which `receiver` gets its events.

        Raises InvalidRequestError or EngineUnavailableError; then nothing has been queued. An
        overloaded engine refuses with the request's first event, which is then an error.
        """
        info = self.model_info()
        built = _build_request(request, info)
        self._thread.submit(built, receiver)
        return built.request_id

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenEvent]:
        """The request's events, the last with a finish_reason. Leaving early aborts it.

        Raises what `submit` raises before the first event, RequestFailedError or EngineDeadError
        when the stream ends with an error.
        """
        streams = self._streams_of(asyncio.get_running_loop())
        request_id = self.submit(request, streams.receiver)
        stream = TokenStream(on_drop=lambda: self.abort(request_id))
        # Nothing can have been put yet: events reach this loop through a callback.
        streams.by_id[request_id] = stream
        try:
            async for event in stream:
                yield event
        finally:
            del streams.by_id[request_id]
            await stream.aclose()

    def abort(self, request_id: str) -> None:
        """End a request; its blocks are free before the next step. Unknown ids are ignored."""
        self._thread.abort(request_id)

    def abort_all_of(self, receiver: Receiver) -> None:
        """End every request whose events go to `receiver`."""
        for request_id in self._thread.output_queue.request_ids_of(receiver):
            self.abort(request_id)

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
        self.by_id: dict[str, TokenStream] = {}
        self.receiver = LoopReceiver(loop, self._fan_out)

    def _fan_out(self, events: list[TokenEvent]) -> None:
        for event in events:
            if (stream := self.by_id.get(event.request_id)) is not None:
                stream.put(event)


def _build_request(request: GenerateRequest, info: ModelInfo) -> Request:
    params = request.params
    num_prompt_tokens = len(request.prompt_token_ids)
    _check_token_ids("prompt", request.prompt_token_ids, info.vocab_size)
    _check_token_ids("stop_token_ids", params.stop_token_ids, info.vocab_size)
    limits.PRIORITY.check(request.priority)
    limits.check_at_most(
        "cache_salt", len(request.cache_salt), limits.MAX_CACHE_SALT_CHARS, "characters"
    )
    stop_token_ids = frozenset(params.stop_token_ids)
    return Request(
        request_id=uuid.uuid4().hex,
        token_ids=list(request.prompt_token_ids),
        num_prompt_tokens=num_prompt_tokens,
        params=params,
        max_tokens=_resolve_max_tokens(params.max_tokens, num_prompt_tokens, info.max_model_len),
        stop_token_ids=stop_token_ids.union(() if params.ignore_eos else info.eos_token_ids),
        seed=secrets.randbits(63) if params.seed is None else params.seed,
        arrival_time=time.monotonic(),
        cache_salt=request.cache_salt,
        priority=request.priority,
    )


def _check_token_ids(field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    for token_id in token_ids:
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            raise InvalidRequestError(
                f"{field} has the token id {token_id!r:.40}; ids must be integers from 0 to"
                f" {vocab_size - 1}",
                field=field,
            )


def _resolve_max_tokens(wanted: int | None, num_prompt_tokens: int, max_model_len: int) -> int:
    """`wanted`, or what is left of the context. Raises when prompt and output do not fit."""
    if num_prompt_tokens == 0:
        raise InvalidRequestError("prompt must have at least 1 token, got 0", field="prompt")
    limits.check_prompt_fits(num_prompt_tokens, max_model_len)
    left = max_model_len - num_prompt_tokens
    if wanted is not None and wanted > left:
        raise PromptTooLongError(
            f"prompt has {num_prompt_tokens} tokens and max_tokens asks for {wanted} more, but"
            f" this model's context is {max_model_len} tokens; at most {left} can be asked for",
            field="max_tokens",
        )
    return left if wanted is None else wanted
