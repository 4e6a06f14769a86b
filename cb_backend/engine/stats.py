"""What the engine counts, and the log of its last steps. Written by the engine thread alone.

Other threads read through `snapshot`: each number is one Python object, so it is never torn, and
numbers of the same snapshot may be one step apart.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from cb_backend.core.request import FinishReason
from cb_backend.core.scheduler import Scheduler
from cb_backend.core.step_io import StepPlan, TokenEvent

STEP_LOG_LENGTH = 4096


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step, as it was: who shared it, with how many tokens each."""

    step: int
    time: float  # seconds, the engine's clock, when it ended
    seconds: float  # how long it took, scheduling included
    rows: tuple[tuple[str, int], ...]  # (request_id, num_scheduled_tokens), oldest request first
    num_running: int
    num_waiting: int

    @property
    def num_tokens(self) -> int:
        return sum(num_tokens for _, num_tokens in self.rows)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Gauges of this moment, and counters since the start."""

    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float = 0.0  # 0 to 1: share of the KV blocks in use
    steps: int = 0
    failed_steps: int = 0
    preemptions: int = 0
    computed_tokens: int = 0  # tokens that went through the model, recomputed ones again
    cached_tokens: int = 0  # prompt tokens that the prefix cache saved
    prompt_tokens: int = 0  # of all requests that were taken in
    generated_tokens: int = 0
    finished: dict[FinishReason, int] = field(default_factory=dict)


@dataclass(slots=True)
class StatsRecorder:
    """The engine's running totals."""

    steps: int = 0
    failed_steps: int = 0
    computed_tokens: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    finished: Counter[FinishReason] = field(default_factory=Counter)
    step_log: deque[StepRecord] = field(default_factory=lambda: deque(maxlen=STEP_LOG_LENGTH))

    def record_step(
        self, plan: StepPlan, started: float, ended: float, scheduler: Scheduler, *, failed: bool
    ) -> None:
        self.steps += 1
        self.failed_steps += failed
        self.computed_tokens += plan.num_tokens
        self.step_log.append(
            StepRecord(
                step=plan.step,
                time=ended,
                seconds=ended - started,
                rows=tuple((row.request_id, row.num_scheduled_tokens) for row in plan.rows),
                num_running=len(scheduler.running),
                num_waiting=len(scheduler.waiting),
            )
        )

    def record_events(self, events: Sequence[TokenEvent]) -> None:
        for event in events:
            self.generated_tokens += len(event.token_ids)
            if event.finish_reason is not None:
                self.finished[event.finish_reason] += 1
