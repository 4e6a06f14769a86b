"""The far side of the output queue: one stream per request, read at its own pace.

The product's OutputQueue and TokenStream, without a loop: a stream that has something unread gives
it without waiting, so its coroutine is finished by the first send.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from cb_backend.core.request import FinishReason
from cb_backend.core.step_io import TokenEvent
from cb_backend.engine.output_queue import OutputQueue
from cb_backend.errors import CBError
from cb_backend.serving.token_stream import TokenStream


class Readers:
    """A Receiver. `output` and `ended` are what the readers have seen."""

    def __init__(self, queue: OutputQueue) -> None:
        self._queue = queue
        self._streams: dict[str, TokenStream] = {}
        self._paces: dict[str, int] = {}  # steps between two reads
        self.output: dict[str, list[int]] = defaultdict(list)
        self.ended: dict[str, FinishReason] = {}
        self.errors: dict[str, CBError] = {}
        self.delivered_end: set[str] = set()  # whose terminal event is in the stream

    def open(self, name: str, pace: int) -> None:
        self._streams[name] = TokenStream(on_drop=lambda: None)
        self._paces[name] = pace
        self._queue.register(name, self)

    def deliver(self, events: Sequence[TokenEvent]) -> bool:
        for event in events:
            self._streams[event.request_id].put(event)  # raises after the terminal one
            if event.finish_reason is not None:
                self.delivered_end.add(event.request_id)
        return True

    def read(self, step: int) -> None:
        """Those whose turn it is read whatever there is."""
        for name, pace in self._paces.items():
            if step % pace == 0 and name not in self.ended:
                self._read_all(name)

    def read_everything(self) -> None:
        for name in self._streams.keys() - self.ended.keys():
            self._read_all(name)

    def _read_all(self, name: str) -> None:
        while name not in self.ended and (event := self._next(name)) is not None:
            self.output[name].extend(event.token_ids)
            if event.finish_reason is not None:
                self.ended[name] = event.finish_reason

    def _next(self, name: str) -> TokenEvent | None:
        """None when there is nothing to read yet."""
        stream = self._streams[name]
        if not stream.has_unread:
            return None
        try:
            anext(stream).__await__().send(None)
        except StopIteration as stop:
            event = stop.value
            assert isinstance(event, TokenEvent)
            return event
        except CBError as error:
            self.ended[name] = FinishReason.ERROR
            self.errors[name] = error
            return None
        raise AssertionError(f"the stream of {name} waits although it has something")
