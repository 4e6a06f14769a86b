"""Hands each step's events to whoever waits for them: in order, and one call per receiver.

`register` and `request_ids_of` may be called from any thread; `publish` and `fail_all` are
called by the engine thread, and `fail_all` by the watchdog when that thread is beyond reach.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Sequence
from typing import Protocol

from cb_backend.core.request import FinishReason
from cb_backend.core.step_io import NextTokens, TokenEvent
from cb_backend.errors import CBError


class Receiver(Protocol):
    """One reader of many requests, as a rule one per event loop."""

    def deliver(self, events: Sequence[TokenEvent]) -> bool:
        """Called once per step, off the receiver's own thread. Must be quick, not raise, and not
        call back into the queue.

        Returns False when the reader is gone for good: the engine then aborts its requests.
        """
        ...


Batches = Sequence[tuple[Receiver, Sequence[TokenEvent]]]


class OutputQueue:
    """Knows the receiver of every live request, and ends each request exactly once.

    A registration lives from submit to the terminal event, so whatever ends a request, the engine,
    a crash or the watchdog, the first to come removes it and later events of it go nowhere.
    """

    def __init__(self) -> None:
        self._receivers: dict[str, Receiver] = {}
        self._fatal: CBError | None = None
        # Who reads these requests, in step after step the same; () once that may have changed.
        self._readers_are_of: tuple[str, ...] = ()
        self._readers: set[Receiver | None] = set()
        # Submitters register while the engine publishes. Held while events are handed over too, or
        # the watchdog's terminal event could overtake a step that returns late.
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._receivers)

    def register(self, request_id: str, receiver: Receiver) -> None:
        """Raises what `fail_all` was given once the engine is beyond use."""
        with self._lock:
            if self._fatal is not None:
                raise self._fatal
            self._receivers[request_id] = receiver
            self._readers_are_of = ()

    def request_ids_of(self, receiver: Receiver) -> list[str]:
        """The live requests of one receiver, for aborting them when it goes away."""
        with self._lock:
            return [rid for rid, owner in self._receivers.items() if owner is receiver]

    def publish(self, events: Sequence[TokenEvent]) -> list[str]:
        """Deliver one step's events, grouped so that each receiver is called once.

        Returns the ids of live requests whose receiver turned out to be gone.
        """
        with self._lock:
            gone = [r for r, batch in self._batches(events) if not r.deliver(batch)]
        return [request_id for receiver in gone for request_id in self.request_ids_of(receiver)]

    def _batches(self, events: Sequence[TokenEvent]) -> Batches:
        if isinstance(events, NextTokens):
            if events.request_ids is not self._readers_are_of:
                self._readers_are_of = events.request_ids
                self._readers = set(map(self._receivers.get, events.request_ids))
            if len(self._readers) == 1:  # nearly always
                return [(reader, events) for reader in self._readers if reader is not None]
        batches: defaultdict[Receiver | None, list[TokenEvent]] = defaultdict(list)
        for event in events:
            if event.finish_reason is None:
                receiver = self._receivers.get(event.request_id)
            else:
                receiver = self._receivers.pop(event.request_id, None)
                self._readers_are_of = ()
            batches[receiver].append(event)
        # None: of requests that had ended already.
        return [(r, batch) for r, batch in batches.items() if r is not None]

    def fail_all(self, error: CBError, *, step: int, now: float, final: bool) -> int:
        """End every live request with `error`; when `final`, refuse later ones with it too."""
        with self._lock:
            if final:
                self._fatal = error
            request_ids = list(self._receivers)
        self.publish(
            [
                TokenEvent(
                    request_id=request_id,
                    token_ids=(),
                    step=step,
                    time=now,
                    finish_reason=FinishReason.ERROR,
                    error=error.info(),
                )
                for request_id in request_ids
            ]
        )
        return len(request_ids)
