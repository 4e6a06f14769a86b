"""Notices a client that leaves, and streams events to one that stays. Asyncio loop.

A server tells an application that its client has left through `receive`, and only if asked.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable
from typing import TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

# A client that takes nothing for this long is gone, whatever its socket says.
STALLED_CLIENT_S = 60.0

EVENT_STREAM = "text/event-stream"

T = TypeVar("T")


class ClientLeftError(Exception):
    """The client of this request has gone; nobody will read the answer."""


async def run_while_connected(receive: Receive, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled when the client leaves: ClientLeftError then.

    The request's body must have been read: what `receive` gives next is the disconnect.
    """
    return await _run_until(work, _client_left(receive))


async def _run_until(work: Awaitable[T], *ends: Awaitable[None]) -> T:
    """The result of `work`, which is cancelled at the first of `ends`: ClientLeftError then."""
    task = asyncio.ensure_future(work)
    watchers = [asyncio.ensure_future(end) for end in ends]
    try:
        await asyncio.wait({task, *watchers}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientLeftError
        return task.result()
    finally:
        for each in (*watchers, task):
            each.cancel()
        # The work is closed, and its engine request aborted, before the caller goes on.
        await asyncio.gather(task, *watchers, return_exceptions=True)


async def _client_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class StreamResponse(Response):
    """Lines out of an async generator, which is closed on every way out."""

    def __init__(
        self, first: bytes, rest: AsyncGenerator[bytes, None], *, media_type: str = EVENT_STREAM
    ) -> None:
        """`first` has been awaited already, so that the status is known; it may be empty."""
        super().__init__(
            headers={"cache-control": "no-cache", "x-accel-buffering": "no"}, media_type=media_type
        )
        del self.headers["content-length"]
        self._first = first
        self._rest = rest
        self._sending_since: float | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await _run_until(self._send_all(send), _client_left(receive), self._client_stalled())
        except ClientLeftError:
            pass  # there is nobody to tell; the server closes the connection
        finally:
            await self._rest.aclose()

    async def _send_all(self, send: Send) -> None:
        await send(
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
        )
        await self._send_piece(send, self._first)
        async for piece in self._rest:
            await self._send_piece(send, piece)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_piece(self, send: Send, piece: bytes) -> None:
        self._sending_since = time.monotonic()
        await send({"type": "http.response.body", "body": piece, "more_body": True})
        self._sending_since = None

    async def _client_stalled(self) -> None:
        """Looks when the client could have stalled: a timer for each piece would cost as much as
        the piece."""
        left = STALLED_CLIENT_S
        while left > 0:
            await asyncio.sleep(left)
            since = self._sending_since
            left = STALLED_CLIENT_S - (0 if since is None else time.monotonic() - since)
