"""What the engine counts, and the log of its last steps. Written by the engine thread alone.

Other threads read through `snapshot`: each number is one Python object, so it is never torn, and
numbers of the same snapshot may be one step apart.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from cb_backend.core.request import FinishReason, Request
from cb_backend.core.scheduler import Scheduler
from cb_backend.core.step_io import CopyKind, TokenEvent
from cb_backend.engine.launched_step import LaunchedStep

STEP_LOG_LENGTH = 4096
MOST_TENANTS = 256  # that are counted by name
OTHER_TENANTS = "(other)"  # no tenant can have this name


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step, as it was: who shared it, with how many tokens each."""

    step: int
    time: float  # seconds, the engine's clock, when it ended
    seconds: float  # how long it took, scheduling included, or since the end of the one before
    request_ids: tuple[str, ...]  # of its rows, in the order of the policy
    num_scheduled_tokens: tuple[int, ...]  # of each; two tuples a step, since thousands are kept
    num_running: int
    num_waiting: int
    blocks_in_use: int
    num_preemptions: int
    num_copies: dict[CopyKind, int]  # of blocks; a kind that did not happen is left out

    @property
    def num_tokens(self) -> int:
        return sum(self.num_scheduled_tokens)

    @property
    def rows(self) -> tuple[tuple[str, int], ...]:
        """(request_id, num_scheduled_tokens)"""
        return tuple(zip(self.request_ids, self.num_scheduled_tokens, strict=True))


@dataclass(frozen=True, slots=True)
class TenantUsage:
    """What the requests of a tenant took, those that have ended."""

    device_seconds: float = 0.0
    kv_block_seconds: float = 0.0
    tokens_saved: int = 0  # prompt tokens that the prefix cache, or another choice, had computed
    generated_tokens: int = 0

    def with_request(self, request: Request) -> TenantUsage:
        return TenantUsage(
            self.device_seconds + request.device_seconds,
            self.kv_block_seconds + request.block_seconds,
            self.tokens_saved + request.num_cached_tokens,
            self.generated_tokens + request.num_output_tokens,
        )


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
    tenants: dict[str, TenantUsage] = field(default_factory=dict)


@dataclass(slots=True)
class StatsRecorder:
    """The engine's running totals."""

    steps: int = 0
    failed_steps: int = 0
    computed_tokens: int = 0
    prompt_tokens: int = 0
    finished: Counter[FinishReason] = field(default_factory=Counter)
    tenants: dict[str, TenantUsage] = field(default_factory=dict)
    step_log: deque[StepRecord] = field(default_factory=lambda: deque(maxlen=STEP_LOG_LENGTH))
    _live: dict[str, Request] = field(default_factory=dict)
    _preemptions_before: int = 0  # the step that is recorded next

    def record_arrival(self, request: Request) -> None:
        self.prompt_tokens += request.num_prompt_tokens
        self._live[request.request_id] = request

    def record_step(
        self,
        launched: LaunchedStep,
        started: float,
        ended: float,
        scheduler: Scheduler,
        *,
        failed: bool,
    ) -> None:
        plan = launched.plan
        self.steps += 1
        self.failed_steps += failed
        self.computed_tokens += plan.num_tokens
        self.step_log.append(
            StepRecord(
                step=plan.step,
                time=ended,
                seconds=ended - started,
                request_ids=plan.rows.request_ids,
                num_scheduled_tokens=plan.rows.num_scheduled_tokens,
                num_running=len(scheduler.running),
                num_waiting=len(scheduler.waiting),
                blocks_in_use=scheduler.blocks.pool.num_in_use,
                num_preemptions=launched.num_preemptions - self._preemptions_before,
                num_copies=dict(Counter(copy.kind for copy in plan.copies)) if plan.copies else {},
            )
        )
        self._preemptions_before = launched.num_preemptions

    def record_events(self, events: Sequence[TokenEvent]) -> None:
        for event in events:
            if event.finish_reason is not None:
                self.finished[event.finish_reason] += 1
                # One that was refused has never arrived.
                if (request := self._live.pop(event.request_id, None)) is not None:
                    self._charge(request)

    def _charge(self, request: Request) -> None:
        tenant = request.tenant
        if tenant not in self.tenants and len(self.tenants) >= MOST_TENANTS:
            tenant = OTHER_TENANTS
        usage = self.tenants.get(tenant, TenantUsage())
        self.tenants[tenant] = usage.with_request(request)
