"""What other threads want of the engine: messages, and calls whose answers are awaited."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from cb_backend.core.request import Request
from cb_backend.engine.engine import Engine
from cb_backend.errors import CBError, EngineDeadError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Submit:
    requests: tuple[Request, ...]  # queued one after the other, with no step between


@dataclass(frozen=True, slots=True)
class Abort:
    request_id: str


@dataclass(frozen=True, slots=True)
class Call:
    function: Callable[[Engine], Any]
    answer: Future[Any]

    def run(self, engine: Engine) -> None:
        if self.answer.done() or not self.answer.set_running_or_notify_cancel():
            return
        with contextlib.suppress(InvalidStateError):  # it hung, and was answered by `close`
            try:
                self.answer.set_result(self.function(engine))
            except Exception as error:  # the caller's, who waits for it
                self.answer.set_exception(error)
                if isinstance(error, EngineDeadError):
                    raise  # and everybody's: the engine cannot go on after this one


@dataclass(frozen=True, slots=True)
class Stop:
    deadline: float  # seconds, monotonic: what still runs then is ended with an error


Message = Submit | Abort | Call | Stop


class Inbox:
    """Any thread puts, the engine thread takes. Once closed, nobody waits for an answer."""

    def __init__(self) -> None:
        self._messages: SimpleQueue[Message] = SimpleQueue()
        self._calls: set[Future[Any]] = set()
        self._closed: CBError | None = None
        self._lock = threading.Lock()

    def put(self, message: Message) -> None:
        self._messages.put(message)

    def call(self, function: Callable[[Engine], T]) -> Future[T]:
        """The future of `function(engine)`, run between two steps. Raises once closed."""
        answer: Future[T] = Future()
        with self._lock:
            if self._closed is not None:
                raise self._closed
            self._calls.add(answer)
        answer.add_done_callback(self._calls.discard)
        self._messages.put(Call(function, answer))
        return answer

    def take(self, *, wait: bool, limit_s: float | None) -> Message | None:
        """The next message; without `wait`, or after `limit_s` of it, None when there is none."""
        try:
            return self._messages.get(block=wait, timeout=limit_s)
        except Empty:
            return None

    def close(self, error: CBError) -> None:
        """Nothing will be taken any more: whoever waits for an answer gets `error`."""
        with self._lock:
            self._closed = error
            calls = list(self._calls)
        for answer in calls:
            # Also one that is running, in a thread that hangs or has died of it.
            with contextlib.suppress(InvalidStateError):
                answer.set_exception(error)
