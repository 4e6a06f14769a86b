"""Says where each request stands and what it waits for. Engine thread only, between steps."""

from __future__ import annotations

from dataclasses import dataclass

from cb_backend.core.rates import StepRates
from cb_backend.core.request import Request, RequestStatus
from cb_backend.core.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class RequestView:
    """One live request, for a person."""

    request_id: str
    state: str  # running, waiting, preempted, or forked (waits for another's prompt)
    position: int  # in the queue, 0 the next; among the running: in the order of the policy
    waits_for: str  # why it is not computed now; empty when it is
    seconds_to_end: float | None  # an estimate at the measured rates; None before any
    tenant: str
    priority: int
    num_prompt_tokens: int
    num_output_tokens: int
    max_tokens: int
    num_computed_tokens: int
    num_cached_tokens: int
    num_blocks: int
    num_preemptions: int
    age_s: float
    device_seconds: float
    kv_block_seconds: float


def explain(scheduler: Scheduler, rates: StepRates, now: float) -> list[RequestView]:
    """Every live request: the running ones, then the queue in its order, then the forks."""
    running = [(r, "") for r in scheduler.roster.in_order()]
    queue = scheduler.waiting.in_order()
    reason = _why_first_waits(scheduler)
    waiting = [
        (r, reason if place == 0 else f"{place} before it: {reason}")
        for place, r in enumerate(queue)
    ]
    forks = [
        (fork, f"the prompt of {parent}")
        for parent, group in scheduler.roster.forks.items()
        for fork in group
    ]
    ahead, views = 0.0, []
    for group in (running, waiting, forks):
        for position, (request, waits_for) in enumerate(group):
            request.charge(scheduler.blocks.step_seconds)
            ahead += request.num_uncomputed_tokens
            seconds = _seconds_to_end(request, ahead, scheduler, rates)
            views.append(_view(request, position, waits_for, seconds, now))
    return views


def _why_first_waits(scheduler: Scheduler) -> str:
    if not scheduler.waiting:
        return ""
    return scheduler.planner.lacks(scheduler.waiting.peek()) or "the next step"


def _seconds_to_end(
    request: Request, ahead: float, scheduler: Scheduler, rates: StepRates
) -> float | None:
    """`ahead` are the uncomputed tokens up to its last; then a step for each token of output."""
    if not rates.is_known:
        return None
    batch = min(max(len(scheduler.running), 1), scheduler.limits.max_num_seqs)
    still_to_come = request.max_tokens - request.num_output_tokens
    return ahead / rates.tokens_per_s + still_to_come * rates.step_seconds(batch)


def _view(
    request: Request, position: int, waits_for: str, seconds: float | None, now: float
) -> RequestView:
    is_fork = waits_for.startswith("the prompt of")
    status = RequestStatus(request.status).name.lower()
    return RequestView(
        request_id=request.request_id,
        state="forked" if is_fork else status,
        position=position,
        waits_for=waits_for,
        seconds_to_end=seconds,
        tenant=request.tenant,
        priority=request.priority,
        num_prompt_tokens=request.num_prompt_tokens,
        num_output_tokens=request.num_output_tokens,
        max_tokens=request.max_tokens,
        num_computed_tokens=request.num_computed_tokens,
        num_cached_tokens=request.num_cached_tokens,
        num_blocks=len(request.block_table),
        num_preemptions=request.num_preemptions,
        age_s=now - request.arrival_time,
        device_seconds=request.device_seconds,
        kv_block_seconds=request.block_seconds,
    )
