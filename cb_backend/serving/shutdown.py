"""Learns that this process is told to end while it still serves. Main thread, then the loop.

BentoML's own hooks run only after the last response has been sent, which may be never.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable
from types import FrameType


def on_termination(callback: Callable[[], None]) -> None:
    """Run `callback` on the running loop at SIGTERM or SIGINT, beside the server's own handling.

    Does nothing in a thread other than the main one, where Python has no signals: such a server
    is a test's, and is stopped by its own means.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        previous = signal.getsignal(number)

        def handle(
            received: int,
            frame: FrameType | None,
            previous: object = previous,
        ) -> None:
            # Not in the handler itself: it interrupts the main thread anywhere, locks held.
            if not loop.is_closed():
                loop.call_soon_threadsafe(callback)
            if callable(previous):
                previous(received, frame)

        signal.signal(number, handle)
