"""The time that a check may take, and what it leaves out when that is gone."""

from __future__ import annotations

import time


class TimeBudget:
    """Counts from its making."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds
        self.left_out: list[str] = []

    def seconds_left(self) -> float:
        return max(0.0, self._end - time.monotonic())

    def allows(self, name: str, seconds: float = 0.0) -> bool:
        """Whether `seconds` are left, of which `name` may take as many; else it is left out."""
        if self.seconds_left() > seconds:
            return True
        self.left_out.append(name)
        return False
