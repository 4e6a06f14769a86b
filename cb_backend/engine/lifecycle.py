"""Where an engine stands between loading and its end. Any thread."""

from __future__ import annotations

import logging
import threading
from enum import IntEnum

from cb_backend.errors import CBError, EngineDeadError, EngineNotReadyError

logger = logging.getLogger(__name__)


class EngineStatus(IntEnum):
    """Only ever goes up."""

    LOADING = 0
    READY = 1
    DRAINING = 2
    STOPPED = 3
    DEAD = 4  # crashed or hangs; the process is of no more use


class Lifecycle:
    """The status, and the error that goes with DEAD."""

    def __init__(self) -> None:
        self.status = EngineStatus.LOADING
        self.error: CBError | None = None  # why the status is DEAD
        self.ended = threading.Event()  # the engine thread takes nothing from its inbox any more
        self._lock = threading.Lock()

    @property
    def is_dead(self) -> bool:
        return self.status is EngineStatus.DEAD

    def advance(self, status: EngineStatus) -> None:
        with self._lock:
            self.status = max(self.status, status)

    def die(self, reason: str) -> CBError:
        """DEAD, for the first reason that was given; returns the error to tell everyone."""
        with self._lock:
            if self.error is None:
                self.error = EngineDeadError(reason)
            self.status = EngineStatus.DEAD
        logger.critical("engine dead: %s", reason)
        return self.error

    def refusal(self) -> CBError:
        """What to tell who wants something of an engine that is not ready."""
        match self.status:
            case EngineStatus.LOADING:
                return EngineNotReadyError("the model is still loading; try again soon")
            case EngineStatus.DEAD:
                return self.error or EngineDeadError("the engine is dead")
            case _:
                return EngineNotReadyError("the engine is shutting down and takes no new requests")
