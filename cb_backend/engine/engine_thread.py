"""Owns the engine thread and the watchdog beside it.

`submit`, `abort`, `drain` and `close` may be called from any thread. `_run` and what it calls
execute on the engine thread, `_watch` on the watchdog's. Two crossings only: the inbox and the
output queue.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from enum import IntEnum
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from cb_backend.core.request import Request
from cb_backend.core.step_io import ModelInfo, TokenEvent
from cb_backend.engine.engine import Engine
from cb_backend.engine.output_queue import OutputQueue, Receiver
from cb_backend.engine.stats import EngineStats
from cb_backend.errors import (
    CBError,
    EngineDeadError,
    EngineNotReadyError,
    EngineUnavailableError,
)

T = TypeVar("T")

logger = logging.getLogger(__name__)

IDLE_CHECK_INTERVAL_S = 10.0  # the books are checked at most this often when the engine falls idle


class EngineStatus(IntEnum):
    """Only ever goes up."""

    LOADING = 0
    READY = 1
    DRAINING = 2
    STOPPED = 3
    DEAD = 4  # crashed or hangs; the process is of no more use


@dataclass(frozen=True, slots=True)
class _Submit:
    request: Request


@dataclass(frozen=True, slots=True)
class _Abort:
    request_id: str


@dataclass(frozen=True, slots=True)
class _Call:
    function: Callable[[Engine], object]
    answer: Future[object]


@dataclass(frozen=True, slots=True)
class _Stop:
    deadline: float  # seconds, monotonic: what still runs then is ended with an error


class EngineThread:
    """Builds the engine inside its thread, feeds it from the inbox, and ends every stream once."""

    def __init__(
        self, build: Callable[[], Engine], *, step_timeout_s: float, drain_timeout_s: float
    ) -> None:
        self._build = build
        self._step_timeout_s = step_timeout_s
        self._drain_timeout_s = drain_timeout_s
        self._inbox: SimpleQueue[_Submit | _Abort | _Call | _Stop] = SimpleQueue()
        self.output_queue = OutputQueue()
        self._status = EngineStatus.LOADING
        self._status_lock = threading.Lock()
        self._error: CBError | None = None
        self._engine: Engine | None = None
        self._stop_at: float | None = None  # engine thread's
        self._next_idle_check = 0.0
        self._busy_since: float | None = None  # when the step that runs now began
        self._ended = threading.Event()
        self._calls: set[Future[Any]] = set()
        self._calls_lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="cb-engine", daemon=True)
        self._watchdog = threading.Thread(target=self._watch, name="cb-watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()
        self._watchdog.start()

    @property
    def status(self) -> EngineStatus:
        return self._status

    @property
    def error(self) -> CBError | None:
        """Why the status is DEAD."""
        return self._error

    @property
    def model_info(self) -> ModelInfo:
        """Raises EngineNotReadyError until the model is loaded, EngineDeadError after a crash."""
        if self._engine is None or self._status is EngineStatus.DEAD:
            raise self._unavailable()
        return self._engine.model_info

    def stats(self) -> EngineStats:
        return EngineStats() if self._engine is None else self._engine.stats()

    @property
    def engine(self) -> Engine:
        """For reading the step log; its methods assert the engine thread."""
        if self._engine is None:
            raise self._unavailable()
        return self._engine

    def submit(self, request: Request, receiver: Receiver) -> None:
        """Raises EngineUnavailableError unless the engine is ready."""
        if self._status is not EngineStatus.READY:
            raise self._unavailable()
        self.output_queue.register(request.request_id, receiver)
        self._inbox.put(_Submit(request))

    def abort(self, request_id: str) -> None:
        """The request's blocks are free before the next step. An unknown id is no error."""
        self._inbox.put(_Abort(request_id))

    def call(self, function: Callable[[Engine], T]) -> Future[T]:
        """Run `function` on the engine thread between two steps; its result or error is the
        future's. Raises EngineUnavailableError unless the engine is ready or draining."""
        if self._status not in (EngineStatus.READY, EngineStatus.DRAINING):
            raise self._unavailable()
        answer: Future[T] = Future()
        with self._calls_lock:
            if self._ended.is_set():
                raise self._unavailable()
            self._calls.add(answer)
        answer.add_done_callback(self._calls.discard)
        self._inbox.put(_Call(function, answer))  # type: ignore[arg-type]
        return answer

    def drain(self) -> None:
        """Refuse new requests, let the others finish until drain_timeout_s is over, then stop."""
        self._advance(EngineStatus.DRAINING)
        self._inbox.put(_Stop(time.monotonic() + self._drain_timeout_s))

    def close(self) -> None:
        """Drain and wait for the end. May be called again. A hanging step is not waited for."""
        self.drain()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._ended.wait(self._drain_timeout_s + self._step_timeout_s)
            if self._status is not EngineStatus.DEAD:
                self._thread.join()

    # Engine thread.

    def _run(self) -> None:
        try:
            self._engine = self._build()
            self._advance(EngineStatus.READY)
            self._serve(self._engine)
            self._engine.close()
        except BaseException as error:  # whatever it was, nobody may wait for ever
            logger.exception("the engine thread ends")
            # A CBError is ours and explains itself; another error's text may hold users' data.
            why = error.message if isinstance(error, CBError) else type(error).__name__
            self._die(f"the engine thread crashed: {why}")
        else:
            self._advance(EngineStatus.STOPPED)
            self._end_all(EngineUnavailableError("the engine has shut down"))
        finally:
            self._end()

    def _serve(self, engine: Engine) -> None:
        while not self._is_over(engine):
            self._take_messages(engine)
            if engine.has_work and not self._is_over(engine):
                self._busy_since = time.monotonic()
                self._publish(engine, engine.step())
                self._busy_since = None
            if not engine.has_work:
                self._check_when_idle(engine)

    def _is_over(self, engine: Engine) -> bool:
        if self._status is EngineStatus.DEAD:
            return True
        if self._stop_at is None:
            return False
        return not engine.has_work or time.monotonic() >= self._stop_at

    def _take_messages(self, engine: Engine) -> None:
        """Everything that has come in; waits for something when there is nothing to compute."""
        must_wait = not engine.has_work and self._stop_at is None
        while True:
            try:
                message = self._inbox.get(block=must_wait)
            except Empty:
                return
            must_wait = False
            match message:
                case _Submit(request):
                    self._publish(engine, engine.add(request))
                case _Abort(request_id):
                    self._publish(engine, engine.abort(request_id))
                case _Call(function, answer):
                    _run_call(function, answer, engine)
                case _Stop(deadline):
                    self._stop_at = min(deadline, self._stop_at or deadline)

    def _publish(self, engine: Engine, events: list[TokenEvent]) -> None:
        if self._status is EngineStatus.DEAD:
            return  # the watchdog has ended every stream while this step hung
        for request_id in self.output_queue.publish(events) if events else ():
            # Its reader's event loop is closed; the abort's own event has nowhere to go either.
            self.output_queue.publish(engine.abort(request_id))

    def _check_when_idle(self, engine: Engine) -> None:
        if time.monotonic() >= self._next_idle_check:
            engine.check()
            self._next_idle_check = time.monotonic() + IDLE_CHECK_INTERVAL_S

    # Watchdog.

    def _watch(self) -> None:
        interval = min(1.0, self._step_timeout_s / 4)
        while not self._ended.wait(interval):
            busy_since = self._busy_since
            if busy_since is not None and time.monotonic() - busy_since > self._step_timeout_s:
                logger.critical("the engine thread hangs here:\n%s", self._engine_stack())
                self._die(f"a step has been running for more than {self._step_timeout_s:g} s")
                self._end()
            elif not self._thread.is_alive():
                self._die("the engine thread has disappeared")
                self._end()

    def _engine_stack(self) -> str:
        frame = sys._current_frames().get(self._thread.ident or 0)
        return "".join(traceback.format_stack(frame)) if frame else "(no Python frame)"

    # Any of them.

    def _end(self) -> None:
        """Nothing is taken from the inbox any more: whoever waits for a call is told."""
        with self._calls_lock:
            self._ended.set()
            calls = list(self._calls)
        for answer in calls:
            if answer.set_running_or_notify_cancel():
                answer.set_exception(self._unavailable())

    def _advance(self, status: EngineStatus) -> None:
        with self._status_lock:
            self._status = max(self._status, status)

    def _die(self, reason: str) -> None:
        if self._error is None:
            self._error = EngineDeadError(reason)
        self._advance(EngineStatus.DEAD)
        logger.critical("engine dead: %s", reason)
        self._end_all(self._error)

    def _end_all(self, error: CBError) -> None:
        step = 0 if self._engine is None else self._engine.recorder.steps
        self.output_queue.fail_all(error, step=step, now=time.monotonic(), final=True)

    def _unavailable(self) -> CBError:
        match self._status:
            case EngineStatus.LOADING:
                return EngineNotReadyError("the model is still loading; try again soon")
            case EngineStatus.DRAINING | EngineStatus.STOPPED:
                return EngineNotReadyError("the engine is shutting down and takes no new requests")
            case _:
                return self._error or EngineDeadError("the engine is dead")


def _run_call(function: Callable[[Engine], object], answer: Future[object], engine: Engine) -> None:
    if not answer.set_running_or_notify_cancel():
        return
    try:
        answer.set_result(function(engine))
    except Exception as error:  # the caller's, who waits for it
        answer.set_exception(error)
