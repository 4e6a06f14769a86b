"""How fast steps are, learned from the steps themselves. Engine thread only; no clock of its own.

One model of a step's time, seconds = overhead + tokens * per_token, fitted to the recent steps,
serves three questions: which token budget keeps a target ITL, when a refused client should come
back, and when a queued request would be done.
"""

from __future__ import annotations

_MEMORY = 0.98  # weight of the past at each step: about the last fifty count
_FEWEST_STEPS = 8  # before that, nothing is known


class StepRates:
    """Weighted least squares over (tokens, seconds) of the recent steps."""

    def __init__(self) -> None:
        self.num_steps = 0
        self._weight = 0.0
        self._sum_x = self._sum_y = self._sum_xx = self._sum_xy = 0.0

    def observe(self, num_tokens: int, seconds: float) -> None:
        self.num_steps += 1
        self._weight = self._weight * _MEMORY + 1.0
        self._sum_x = self._sum_x * _MEMORY + num_tokens
        self._sum_y = self._sum_y * _MEMORY + seconds
        self._sum_xx = self._sum_xx * _MEMORY + num_tokens * num_tokens
        self._sum_xy = self._sum_xy * _MEMORY + num_tokens * seconds

    @property
    def is_known(self) -> bool:
        return self.num_steps >= _FEWEST_STEPS and self._sum_x > 0 and self._sum_y > 0

    @property
    def tokens_per_s(self) -> float:
        """Of the recent steps as they were. Ask `is_known` first."""
        return self._sum_x / self._sum_y

    def step_seconds(self, num_tokens: int) -> float:
        """What a step of so many tokens takes. Ask `is_known` first."""
        overhead, per_token = self._fit()
        return overhead + per_token * num_tokens

    def tokens_within(self, seconds: float) -> int:
        """The largest step that takes no longer, 0 if none does. Ask `is_known` first."""
        overhead, per_token = self._fit()
        return max(int((seconds - overhead) / per_token), 0)

    def _fit(self) -> tuple[float, float]:
        """(seconds of overhead, seconds per token), neither negative, the second above 0."""
        mean_x, mean_y = self._sum_x / self._weight, self._sum_y / self._weight
        variance = self._sum_xx / self._weight - mean_x * mean_x
        covariance = self._sum_xy / self._weight - mean_x * mean_y
        # All steps alike, or larger ones faster: the line through the mean and the origin.
        per_token = mean_y / mean_x
        if variance > 1e-3 * mean_x * mean_x and covariance > 0:
            per_token = min(covariance / variance, per_token)
        return mean_y - per_token * mean_x, per_token


class TokenBudget:
    """The token budget that keeps a step within a target time (batching by measured delay)."""

    def __init__(self, *, low: int, high: int, target_s: float | None) -> None:
        """`low` is what every running request needs for its one token."""
        self._low, self._high, self._target_s = low, high, target_s

    def choose(self, rates: StepRates) -> int:
        if self._target_s is None or not rates.is_known:
            return self._high
        return min(max(rates.tokens_within(self._target_s), self._low), self._high)
