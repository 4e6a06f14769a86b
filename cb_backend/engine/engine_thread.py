"""Owns the engine thread: everything from `_run` down executes on it.

`submit`, `abort`, `call`, `drain` and `close` may be called from any thread. Two crossings only:
the inbox and the output queue. A watchdog beside it ends every stream if a step hangs.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

from cb_backend.core.request import Request
from cb_backend.core.step_io import TokenEvent
from cb_backend.engine.controls import mind_neighbours
from cb_backend.engine.engine import Engine
from cb_backend.engine.inbox import Abort, Call, Inbox, Stop, Submit
from cb_backend.engine.lifecycle import EngineStatus, Lifecycle
from cb_backend.engine.output_queue import OutputQueue, Receiver
from cb_backend.engine.saved_cache import save_cache
from cb_backend.engine.watchdog import Watchdog
from cb_backend.errors import CBError, ConfigError, EngineUnavailableError, ModelError

T = TypeVar("T")

logger = logging.getLogger(__name__)

LOOK_AROUND_INTERVAL_S = 1.0  # how soon a neighbour's need for memory is seen


class EngineThread:
    """Builds the engine inside its thread, feeds it from the inbox, and ends every stream once."""

    def __init__(
        self, build: Callable[[], Engine], *, step_timeout_s: float, drain_timeout_s: float
    ) -> None:
        self.life = Lifecycle()
        self.output_queue = OutputQueue()
        self._build = build
        self._step_timeout_s = step_timeout_s
        self._drain_timeout_s = drain_timeout_s
        self._inbox = Inbox()
        self._engine: Engine | None = None
        self._stop_at: float | None = None  # engine thread's
        self._next_look = 0.0  # engine thread's
        self._thread = threading.Thread(target=self._run, name="cb-engine", daemon=True)
        self._watchdog = Watchdog(
            self._thread,
            step_timeout_s=step_timeout_s,
            ended=self.life.ended,
            on_hang=lambda reason: self._end_all(self.life.die(reason)),
        )

    def start(self) -> None:
        self._thread.start()
        self._watchdog.start()

    @property
    def engine(self) -> Engine:
        """For what may be read from any thread. Raises EngineNotReadyError until the model is
        loaded, EngineDeadError after a crash."""
        if self._engine is None or self.life.is_dead:
            raise self.life.refusal()
        return self._engine

    def submit(self, request: Request, receiver: Receiver, forks: Sequence[Request] = ()) -> None:
        """Raises EngineUnavailableError unless the engine is ready; then nothing is queued."""
        if self.life.status is not EngineStatus.READY:
            raise self.life.refusal()
        requests = (request, *forks)
        for one in requests:
            self.output_queue.register(one.request_id, receiver)
        self._inbox.put(Submit(requests))

    def abort(self, request_id: str) -> None:
        """The request's blocks are free before the next step. An unknown id is no error."""
        self._inbox.put(Abort(request_id))

    def call(self, function: Callable[[Engine], T]) -> Future[T]:
        """Run `function` on the engine thread between two steps; its result or error is the
        future's. Raises EngineUnavailableError unless the engine is ready or draining."""
        if self.life.status not in (EngineStatus.READY, EngineStatus.DRAINING):
            raise self.life.refusal()
        return self._inbox.call(function)

    def drain(self, limit_s: float | None = None) -> None:
        """Refuse new requests, let the others finish until `limit_s` (None: drain_timeout_s) is
        over, then stop."""
        limit_s = self._drain_timeout_s if limit_s is None else limit_s
        self.life.advance(EngineStatus.DRAINING)
        self._inbox.put(Stop(time.monotonic() + limit_s))

    def close(self, limit_s: float | None = None) -> None:
        """Drain and wait for the end. May be called again. A hanging step is not waited for."""
        self.drain(limit_s)
        # Not alive: never started, over, or left behind by a fork.
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self.life.ended.wait(self._drain_timeout_s + self._step_timeout_s)
            if not self.life.is_dead:
                self._thread.join()

    # Engine thread.

    def _run(self) -> None:
        try:
            self._engine = _load(self._build)
            self.life.advance(EngineStatus.READY)
            self._serve(self._engine)
            self.life.advance(EngineStatus.STOPPED)
            # Before anything that takes time: whoever still waits has waited long enough.
            self._end_all(EngineUnavailableError("the engine has shut down"))
            if not self.life.is_dead:
                save_cache(self._engine)
            self._engine.close()
        except BaseException as error:  # whatever it was, nobody may wait for ever
            if self._engine is None and self.life.status is EngineStatus.DRAINING:
                # Closed meanwhile, maybe the reason: an interpreter that ends imports no more.
                logger.info("closed while the model loaded: %r", error)
                self.life.advance(EngineStatus.STOPPED)
                self._end_all(EngineUnavailableError("the engine has shut down"))
                return
            if isinstance(error, ModelError):  # nothing crashed: its message says all
                self._end_all(self.life.die(error.message))
                return
            logger.exception("the engine thread ends")
            # A CBError is ours and explains itself; another error's text may hold users' data.
            why = error.message if isinstance(error, CBError) else type(error).__name__
            self._end_all(self.life.die(f"the engine thread crashed: {why}"))
            if self._engine is not None:
                self._engine.recording.close()  # what led here

    def _serve(self, engine: Engine) -> None:
        while not self._is_over(engine):
            engine.help()
            self._take_messages(engine)
            if engine.has_work and not self._is_over(engine):
                self._watchdog.step_begins()
                self._publish(engine, engine.step())
            self._look_around(engine)
        if not self.life.is_dead:
            self._publish(engine, engine.collect())
        self._watchdog.step_ends()

    def _is_over(self, engine: Engine) -> bool:
        if self.life.is_dead:
            return True
        if self._stop_at is None:
            return False
        return not engine.has_work or time.monotonic() >= self._stop_at

    def _take_messages(self, engine: Engine) -> None:
        """Everything that has come in; waits for something when there is nothing to compute."""
        wait = not engine.has_work and self._stop_at is None
        if wait:
            self._watchdog.step_ends()  # the one place where nothing need happen
            wait = not engine.executor.use_idle_time()
        # Without a limit nothing wakes an idle engine: only a neighbour's need can call for that.
        limit_s = None if engine.config.min_free_gib is None else LOOK_AROUND_INTERVAL_S
        while (message := self._inbox.take(wait=wait, limit_s=limit_s)) is not None:
            wait = False
            self._watchdog.step_begins()  # a call can hang as well
            match message:
                case Submit(requests):
                    for request in requests:
                        self._publish(engine, engine.add(request))
                case Abort(request_id):
                    self._publish(engine, engine.abort(request_id))
                case Call():
                    self._publish(engine, engine.collect())
                    message.run(engine)
                case Stop(deadline):
                    self._stop_at = min(deadline, self._stop_at or deadline)

    def _publish(self, engine: Engine, events: Sequence[TokenEvent]) -> None:
        if self.life.is_dead:
            return  # the watchdog has ended every stream while this step hung
        for request_id in self.output_queue.publish(events) if events else ():
            # Its reader's event loop is closed; the abort's own event has nowhere to go either.
            self.output_queue.publish(engine.abort(request_id))

    def _look_around(self, engine: Engine) -> None:
        """Now and then: is there memory to give or to take, and do the books balance?"""
        if time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + LOOK_AROUND_INTERVAL_S
        if engine.config.min_free_gib is not None:
            self._publish(engine, engine.collect())  # no pool is resized under a step in flight
            mind_neighbours(engine)
        if not engine.has_work:
            engine.check()

    # Engine thread or watchdog.

    def _end_all(self, error: CBError) -> None:
        step = 0 if self._engine is None else self._engine.recorder.steps
        self.output_queue.fail_all(error, step=step, now=time.monotonic(), final=True)
        self._inbox.close(error)
        self.life.ended.set()


def _load(build: Callable[[], Engine]) -> Engine:
    """No request is here yet, so whatever is wrong may be told in full."""
    try:
        return build()
    except (ConfigError, ModelError) as error:
        raise ModelError(f"the model cannot be served: {error.message}") from error
