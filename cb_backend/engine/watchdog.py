"""Notices a step that does not come back, or a thread that is gone. A thread of its own."""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable

logger = logging.getLogger(__name__)


class Watchdog:
    """Calls `on_hang(reason)` once and ends; ends without it when `ended` is set first."""

    def __init__(
        self,
        watched: threading.Thread,
        *,
        step_timeout_s: float,
        ended: threading.Event,
        on_hang: Callable[[str], None],
    ) -> None:
        self._watched = watched
        self._step_timeout_s = step_timeout_s
        self._ended = ended
        self._on_hang = on_hang
        self._busy_since: float | None = None  # written by the watched thread
        self._thread = threading.Thread(target=self._watch, name="cb-watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def step_begins(self) -> None:
        self._busy_since = time.monotonic()

    def step_ends(self) -> None:
        self._busy_since = None

    def _watch(self) -> None:
        interval = min(1.0, self._step_timeout_s / 4)
        while not self._ended.wait(interval):
            busy_since = self._busy_since
            if busy_since is not None and time.monotonic() - busy_since > self._step_timeout_s:
                logger.critical("the engine thread hangs here:\n%s", self._stack())
                self._on_hang(f"a step has been running for more than {self._step_timeout_s:g} s")
                return
            if not self._watched.is_alive():
                self._on_hang("the engine thread has disappeared")
                return

    def _stack(self) -> str:
        frame = sys._current_frames().get(self._watched.ident or 0)
        return "".join(traceback.format_stack(frame)) if frame else "(no Python frame)"
