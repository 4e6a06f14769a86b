"""The reader's end of a request: a one-slot mailbox per request, and the loop's way in.

A TokenStream lives on one asyncio loop and is touched only there. A LoopReceiver is the one object
that the engine thread calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from cb_backend.core.request import RequestCost
from cb_backend.core.step_io import TokenEvent
from cb_backend.errors import CBError, error_from_info


class LoopReceiver:
    """A Receiver that moves each step's events onto `loop` with a single wake-up."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, on_batch: Callable[[Sequence[TokenEvent]], None]
    ) -> None:
        self._loop = loop
        self._on_batch = on_batch

    def deliver(self, events: Sequence[TokenEvent]) -> bool:
        try:
            self._loop.call_soon_threadsafe(self._on_batch, events)
        except RuntimeError:  # what asyncio raises for a closed loop: nobody is left to read
            return False
        return True


class TokenStream:
    """An async iterator over one request's events, for one reader; the last has a finish_reason.

    Unread events are merged into one, so a reader that stalls costs a token list, not a queue of
    objects, and never holds up the engine.
    """

    __slots__ = (
        "_closed",
        "_dropped",
        "_finished",
        "_on_drop",
        "_unread",
        "_waiter",
        "on_event",
    )

    def __init__(self, on_drop: Callable[[], None]) -> None:
        self.on_event: Callable[[TokenEvent], None] | None = None  # told of each as it comes
        self._on_drop = on_drop
        self._dropped = False
        self._unread: TokenEvent | None = None
        self._waiter: asyncio.Future[None] | None = None  # the reader's last
        self._finished = False  # the terminal event has been put
        self._closed = False  # the reader has had the terminal event, or has left

    @property
    def has_unread(self) -> bool:
        return self._unread is not None

    def put(self, event: TokenEvent) -> None:
        """Called in the order of the steps. Nothing may follow a terminal event."""
        if self._finished:
            raise AssertionError(f"event after the last one of {event.request_id}")
        self._finished = event.finish_reason is not None
        if self.on_event is not None:
            self.on_event(event)
        if self._closed:
            return  # nobody reads the end of what its reader has left
        self._unread = event if self._unread is None else _merge(self._unread, event)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def __aiter__(self) -> TokenStream:
        return self

    async def __anext__(self) -> TokenEvent:
        """Raises the request's error, as an exception of errors.py, if that is how it ended."""
        if self._closed:
            raise StopAsyncIteration
        while self._unread is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        event, self._unread = self._unread, None
        if event.error is not None and event.token_ids:
            # The tokens that came before the failure are the reader's; the error comes next.
            self._unread = event._replace(token_ids=())
            return event._replace(finish_reason=None, error=None)
        self._closed = event.finish_reason is not None
        if event.error is not None:
            raise error_from_info(event.error)
        return event

    async def aclose(self) -> None:
        """Leave. Calls `on_drop` when the request has not ended yet; may be called again."""
        self._drop()
        self._closed = True
        self._unread = None

    async def end(self) -> RequestCost | None:
        """Stop the request and wait until it has: what it took, if it did not fail meanwhile."""
        self._drop()
        cost = None
        try:
            async for event in self:
                cost = event.cost
        except CBError:
            return None
        return cost

    def _drop(self) -> None:
        if not (self._finished or self._closed or self._dropped):
            self._dropped = True
            self._on_drop()


def _merge(earlier: TokenEvent, later: TokenEvent) -> TokenEvent:
    # By place: a slow reader makes a merge per token, and `_replace` takes four times as long.
    return TokenEvent(
        later.request_id,
        earlier.token_ids + later.token_ids,
        later.step,
        later.time,
        max(earlier.num_cached_tokens, later.num_cached_tokens),
        later.finish_reason,
        later.error,
        later.cost,
    )
