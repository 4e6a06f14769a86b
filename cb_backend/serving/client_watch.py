"""Notices a client that leaves, and streams events to one that stays. Asyncio loop.

A server tells an application that its client has left through `receive`, and only if asked.
"""

from __future__ import annotations

import asyncio
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
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_client_left(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientLeftError
        return task.result()
    finally:
        watcher.cancel()
        task.cancel()
        # The work is closed, and its engine request aborted, before the caller goes on.
        await asyncio.gather(task, watcher, return_exceptions=True)


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

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await run_while_connected(receive, self._send_all(send))
        except (ClientLeftError, TimeoutError):
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
        async with asyncio.timeout(STALLED_CLIENT_S):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
