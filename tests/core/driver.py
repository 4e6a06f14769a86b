"""A scheduler and a shadow executor, stepped by hand with every invariant checked."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from cb_backend.core.invariants import check_plan, check_scheduler
from cb_backend.core.policies import Policy
from cb_backend.core.request import FinishReason, Request
from cb_backend.core.scheduler import Scheduler
from cb_backend.core.scheduler_limits import SchedulerLimits
from cb_backend.core.step_io import StepPlan, TokenEvent
from cb_backend.core.swap_costs import COPYING_IS_FREE, SwapCosts
from tests.fakes import ShadowExecutor, make_model_info, next_by_hashing


def make_limits(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 32,
    max_prefill_chunk: int = 16,
    enable_prefix_caching: bool = True,
    num_host_blocks: int = 0,
    window: int | None = None,
    swap_costs: SwapCosts = COPYING_IS_FREE,
) -> SchedulerLimits:
    return SchedulerLimits(
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_prefill_chunk=max_prefill_chunk,
        enable_prefix_caching=enable_prefix_caching,
        num_host_blocks=num_host_blocks,
        window=window,
        swap_costs=swap_costs,
    )


class Driver:
    """`step()` is the engine's loop body without thread or clock."""

    def __init__(self, limits: SchedulerLimits, policy: Policy | None = None) -> None:
        self.scheduler = Scheduler(limits, policy or Policy())
        info = make_model_info(
            num_blocks=limits.num_blocks, block_size=limits.block_size, window=limits.window
        )
        self.executor = ShadowExecutor(
            info, next_token=next_by_hashing, num_host_blocks=limits.num_host_blocks
        )
        self.output: dict[str, list[int]] = defaultdict(list)
        self.ended: dict[str, FinishReason] = {}
        self.cached: dict[str, int] = {}

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.scheduler.add(request)

    def step(self) -> StepPlan:
        plan = self.scheduler.schedule()
        check_plan(self.scheduler, plan)
        self.take(
            self.scheduler.update(plan, self.executor.launch(plan).result(), now=float(plan.step))
        )
        check_scheduler(self.scheduler)
        return plan

    def run(self, max_steps: int = 10_000) -> None:
        for _ in range(max_steps):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError(f"still at work after {max_steps} steps")

    def abort(self, request_id: str) -> None:
        self.take(self.scheduler.abort(request_id, now=0.0))
        check_scheduler(self.scheduler)

    def take(self, events: Sequence[TokenEvent]) -> None:
        for event in events:
            assert event.request_id not in self.ended, "an event after the last one"
            self.output[event.request_id].extend(event.token_ids)
            self.cached[event.request_id] = event.num_cached_tokens
            if event.finish_reason is not None:
                self.ended[event.request_id] = event.finish_reason


def shares(plan: StepPlan) -> dict[str, int]:
    return {row.request_id: row.num_scheduled_tokens for row in plan.rows}
