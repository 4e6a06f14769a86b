"""A request's way from its arrival to its last event. Engine thread only; no clock, no torch.

There is no prefill and no decode here. Each request has tokens that are known and tokens that are
computed, and every step lets it catch up: a whole prompt, a chunk of one, or the single token
that was sampled last. (vLLM v1's idea.)

A step may be scheduled while the one before is in flight. Its rows then begin with tokens whose ids
are not known here: the executor has them. What the step in flight turns out to have ended leaves a
row without a request in the next one, whose result is dropped. Its blocks are given back at once:
the executor carries steps out in their order, so whoever gets them writes later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from cb_backend.core.kv_blocks import KVBlocks
from cb_backend.core.policies import Policy
from cb_backend.core.request import FinishReason, Request, RequestStatus
from cb_backend.core.roster import Roster
from cb_backend.core.scheduler_limits import SchedulerLimits
from cb_backend.core.step_draft import StepDraft
from cb_backend.core.step_io import CopyKind, StepPlan, StepResult, TokenEvent, events_of
from cb_backend.core.step_planner import StepPlanner
from cb_backend.core.waiting_queue import WaitingQueue
from cb_backend.errors import ErrorInfo, InternalError, PromptTooLongError


class Scheduler:
    """`schedule` a step, have it executed, `update` with its result or `fail` it, in the order of
    the steps; `add` and `abort` between."""

    def __init__(self, limits: SchedulerLimits, policy: Policy) -> None:
        self.limits = limits
        self.token_budget = limits.max_num_batched_tokens  # of a step; may be lowered at run time
        self.roster = Roster(policy)
        self.blocks = KVBlocks(limits)
        self.planner = StepPlanner(limits, self.roster, self.blocks)
        self.num_output_tokens = 0  # since the start
        self._step = 0
        self._last_draft = StepDraft(left=0)
        self._in_flight: deque[tuple[StepPlan, StepDraft]] = deque()

    @property
    def running(self) -> dict[str, Request]:
        return self.roster.running

    @property
    def waiting(self) -> WaitingQueue:
        return self.roster.waiting

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)  # forks wait for one of these

    @property
    def plans_in_flight(self) -> tuple[StepPlan, ...]:
        """Scheduled, and neither updated nor failed."""
        return tuple(plan for plan, _ in self._in_flight)

    @property
    def only_awaits(self) -> bool:
        """Whether all that run wait for nothing but the last token, from a step in flight."""
        return bool(self.running) and not any(
            request.num_uncomputed_tokens for request in self.running.values()
        )

    def add(self, request: Request) -> None:
        """Queue a request. Raises PromptTooLongError if even an empty pool cannot hold it."""
        most_tokens = request.num_prompt_tokens + request.max_tokens - 1  # the last is never read
        if (wanted := self.blocks.blocks_for(most_tokens)) > self.blocks.pool.num_blocks:
            raise PromptTooLongError(
                f"prompt ({request.num_prompt_tokens} tokens) and max_tokens"
                f" ({request.max_tokens}) need {wanted} KV blocks, the pool"
                f" has {self.blocks.pool.num_blocks} of {self.limits.block_size} tokens",
                field="prompt",
            )
        self.roster.add(request)

    def schedule(self) -> StepPlan:
        """The next step. Its rows are empty only if there is no work, or none before the step in
        flight is done."""
        self._step += 1
        draft = self.planner.draft(self.token_budget, self._last_draft)
        plan = draft.plan(self._step, self.roster.take_retired(), self.blocks, self._last_draft)
        self._last_draft = draft
        self._in_flight.append((plan, draft))
        return plan

    def update(
        self, plan: StepPlan, result: StepResult, now: float, seconds: float = 0.0
    ) -> Sequence[TokenEvent]:
        """Take in what `plan` computed in so many seconds, which its requests are charged with;
        returns an event for each request that moved visibly."""
        self.blocks.pins.expire(now)
        draft, rows = self._land(plan, seconds), plan.rows
        for place in draft.may_fill:
            request, num_new = draft.requests[place], rows.num_scheduled_tokens[place]
            num_computed = rows.num_computed_tokens[place]
            if request.status is RequestStatus.RUNNING and request.request_id not in result.failed:
                # Without what a step behind this one computes.
                self.blocks.index_full(request, num_computed + num_new)
        per_token = seconds / max(plan.num_tokens, 1)
        if not self.roster.forks and self.limits.window is None:
            num_changes = self.roster.num_changes
            events = draft.take_in(num_changes, plan.step, result, now, per_token)
            if events is not None:
                self.num_output_tokens += len(events)
                return events
        return self._update_each(draft, plan, result, now, per_token)

    def fail(
        self, plan: StepPlan, error: ErrorInfo, now: float, seconds: float = 0.0
    ) -> list[TokenEvent]:
        """End the requests of a step that raised. Nobody else is touched."""
        out = {copy.target for copy in plan.copies if copy.kind is CopyKind.OUT}
        self.blocks.host.discard(out)  # what should have been copied there may not be
        per_token = seconds / max(plan.num_tokens, 1)
        events = []
        requests, counts = self._land(plan, seconds).requests, plan.rows.num_scheduled_tokens
        for request, num_new in zip(requests, counts, strict=True):
            if request.status is not RequestStatus.FINISHED:
                request.device_seconds += num_new * per_token
                events.append(self._finish(request, plan.step, FinishReason.ERROR, now, error))
        return events

    def abort(self, request_id: str, now: float) -> list[TokenEvent]:
        """End a request wherever it is, blocks and all. An unknown id is no error: it has ended."""
        request = self.roster.find(request_id)
        if request is None:
            return []
        return [self._finish(request, self._step, FinishReason.ABORT, now, None)]

    def _land(self, plan: StepPlan, seconds: float) -> StepDraft:
        """The draft of the oldest step in flight, which `plan` must be. It is over, and before
        anything is taken in of it, its seconds count: requests are charged up to here."""
        launched, draft = self._in_flight.popleft()
        if launched is not plan:
            raise InternalError(f"step {plan.step} lands before step {launched.step}")
        for request in draft.admitted:
            if request.status is RequestStatus.RUNNING:  # its first step: of those before none
                request.charged_until = self.blocks.step_seconds
        self.blocks.step_seconds += seconds
        return draft

    def _update_each(
        self, draft: StepDraft, plan: StepPlan, result: StepResult, now: float, per_token: float
    ) -> list[TokenEvent]:
        """Take in the rows of a step of any kind."""
        fields: list[tuple[object, ...]] = []
        rows, step = plan.rows, plan.step
        running, sampled = RequestStatus.RUNNING, result.token_ids
        is_plain = not (result.failed or self.roster.forks)
        has_window = self.limits.window is not None
        for request, request_id, num_computed, num_new, samples in zip(
            draft.requests,
            rows.request_ids,
            rows.num_computed_tokens,
            rows.num_scheduled_tokens,
            rows.samples,
            strict=True,
        ):
            request.device_seconds += num_new * per_token
            # Hundreds pass here in a step, with one token that is not the last.
            if (
                is_plain
                and samples
                and request.status is running
                and not request.pin_s
                and len(token_ids := sampled[request_id]) == 1
                and token_ids[0] not in request.stop_token_ids
                and len(request.token_ids) + 1 < request.most_tokens
            ):
                request.token_ids.append(token_ids[0])
                num_cached = request.num_cached_tokens
                fields.append((request_id, token_ids, step, now, num_cached, None, None, None))
            else:
                fields += self._update_any(request, samples, plan, result, now)
            if has_window:
                self.blocks.release_outside_window(request, num_computed + num_new)
        events = events_of(fields)
        self.num_output_tokens += sum(len(event.token_ids) for event in events)
        return events

    def _update_any(
        self, request: Request, samples: bool, plan: StepPlan, result: StepResult, now: float
    ) -> list[TokenEvent]:
        """Take in a row of any kind: its request may fail or end, or run no more."""
        if request.status is RequestStatus.FINISHED:
            return []
        if (error := result.failed.get(request.request_id)) is not None:
            return [self._finish(request, plan.step, FinishReason.ERROR, now, error)]
        if not samples:
            return []
        token_ids, reason = request.append_output(result.token_ids[request.request_id])
        if len(token_ids) > 1:  # a step that goes on counts on one
            self.roster.num_changes += 1
        if request.status is RequestStatus.PREEMPTED:
            # While the step was in flight. What was sampled is a token like any other.
            self.waiting.num_tokens += len(token_ids)
        elif request.pin_s:  # at the first token that finds its blocks here
            until = now + request.pin_s
            self.blocks.pins.pin_prompt(request, self.limits.block_size, until)
            request.pin_s = 0.0
        self.roster.queue_forks_of(request)  # its prompt is computed now
        if reason is not None:
            return [self._finish(request, plan.step, reason, now, None, token_ids)]
        return [_event(request, plan.step, token_ids, now, None, None)]

    def _finish(
        self,
        request: Request,
        step: int,
        reason: FinishReason,
        now: float,
        error: ErrorInfo | None,
        token_ids: tuple[int, ...] = (),
    ) -> TokenEvent:
        self.blocks.release(request)
        self.roster.end(request)
        return _event(request, step, token_ids, now, reason, error)


def _event(
    request: Request,
    step: int,
    token_ids: tuple[int, ...],
    now: float,
    reason: FinishReason | None,
    error: ErrorInfo | None,
) -> TokenEvent:
    return TokenEvent(
        request.request_id,
        token_ids,
        step,
        now,
        request.num_cached_tokens,
        reason,
        error,
        None if reason is None else request.cost(),
    )
