"""Whether a new request may queue. Engine thread only; asked once per request, before it waits.

Only new work is refused: what was preempted has been admitted once and always comes back.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from cb_backend.core.rates import StepRates
from cb_backend.core.request import Request
from cb_backend.core.scheduler import Scheduler
from cb_backend.errors import CBError, DeadlineError, OverloadedError

_LONGEST_RETRY_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionLimits:
    max_num_waiting: int  # requests
    max_waiting_tokens: int | None  # prompt tokens of all that wait; None: no limit


def refusal(
    request: Request, scheduler: Scheduler, rates: StepRates, limits: AdmissionLimits, now: float
) -> CBError | None:
    """The error to refuse `request` with, or None to let it queue."""
    waiting = scheduler.waiting
    num_forks = sum(map(len, scheduler.roster.forks.values()))
    num_live = len(waiting) + len(scheduler.running) + num_forks
    cap = limits.max_num_waiting + scheduler.limits.max_num_seqs
    if num_live >= cap:
        ahead = waiting.num_tokens / max(len(waiting), 1)  # until one of them leaves the queue
        return OverloadedError(
            f"{num_live} requests run or wait, the limit is {cap}"
            " (max_num_seqs + max_num_waiting); try again later",
            retry_after_s=_retry_after(ahead, rates),
        )
    too_many = waiting.num_tokens + request.num_prompt_tokens
    # Alone in the queue a request is let in whatever its length: its own limit is the context.
    if limits.max_waiting_tokens is not None and waiting and too_many > limits.max_waiting_tokens:
        return OverloadedError(
            f"{waiting.num_tokens} prompt tokens wait, the limit is {limits.max_waiting_tokens}"
            f" (max_waiting_tokens) and this prompt has {request.num_prompt_tokens};"
            " try again later",
            retry_after_s=_retry_after(too_many - limits.max_waiting_tokens, rates),
        )
    if scheduler.roster.policy.name == "deadline" and rates.is_known:
        return _deadline_refusal(request, scheduler, rates, now)
    return None


def seconds_until_done(request: Request, scheduler: Scheduler, rates: StepRates) -> float:
    """An estimate for a request that is queued now: the work before it, its prompt, its output."""
    key = scheduler.roster.policy.key(request)
    ahead = sum(r.num_uncomputed_tokens for r in scheduler.running.values()) + sum(
        r.num_uncomputed_tokens for r in scheduler.waiting if scheduler.roster.policy.key(r) < key
    )
    prompts = (ahead + request.num_prompt_tokens) / rates.tokens_per_s
    batch = min(len(scheduler.running) + 1, scheduler.limits.max_num_seqs)
    return prompts + request.max_tokens * rates.step_seconds(batch)


def _deadline_refusal(
    request: Request, scheduler: Scheduler, rates: StepRates, now: float
) -> CBError | None:
    if math.isinf(request.deadline):
        return None
    needed, left = seconds_until_done(request, scheduler, rates), request.deadline - now
    if needed <= left:
        return None
    return DeadlineError(
        f"the answer would take about {needed:.2f} s, its deadline is in {max(left, 0.0):.2f} s;"
        " ask for fewer tokens or allow more time",
        field="deadline_s",
    )


def _retry_after(num_tokens: float, rates: StepRates) -> float:
    """Seconds in which the engine computes so many tokens, at the measured rate."""
    if not rates.is_known:
        return 1.0
    return min(max(num_tokens / rates.tokens_per_s, 1.0), _LONGEST_RETRY_S)
