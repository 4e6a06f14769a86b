"""What a test listens with."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from cb_backend.core.step_io import TokenEvent


class RecordingReceiver:
    """A Receiver that keeps what it is given; tests wait for the end of a request on it."""

    def __init__(self, *, gone: bool = False) -> None:
        self.batches: list[Sequence[TokenEvent]] = []
        self._gone = gone
        self._changed = threading.Condition()

    @property
    def events(self) -> list[TokenEvent]:
        return [event for batch in self.batches for event in batch]

    def deliver(self, events: Sequence[TokenEvent]) -> bool:
        with self._changed:
            self.batches.append(events)
            self._changed.notify_all()
        return not self._gone

    def of(self, request_id: str) -> list[TokenEvent]:
        return [event for event in self.events if event.request_id == request_id]

    def tokens_of(self, request_id: str) -> list[int]:
        return [token_id for event in self.of(request_id) for token_id in event.token_ids]

    def wait_for_tokens(self, request_id: str, count: int) -> None:
        self._wait(lambda: len(self.tokens_of(request_id)) >= count, f"{count} of {request_id}")

    def wait_for_end(self, request_id: str) -> TokenEvent:
        self._wait(
            lambda: any(e.finish_reason is not None for e in self.of(request_id)),
            f"the end of {request_id}",
        )
        return self.of(request_id)[-1]

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, timeout=10.0), f"no sign of {what}"
