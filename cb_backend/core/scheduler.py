"""A request's way from its arrival to its last event. Engine thread only; no clock, no torch.

There is no prefill and no decode here. Each request has tokens that are known and tokens that are
computed, and every step lets it catch up: a whole prompt, a chunk of one, or the single token
that was sampled last. (vLLM v1's idea.)
"""

from __future__ import annotations

from cb_backend.core.kv_blocks import KVBlocks
from cb_backend.core.policies import Policy
from cb_backend.core.request import FinishReason, Request
from cb_backend.core.roster import Roster
from cb_backend.core.scheduler_limits import SchedulerLimits
from cb_backend.core.step_io import CopyKind, StepPlan, StepResult, TokenEvent, event_of
from cb_backend.core.step_planner import StepPlanner
from cb_backend.core.waiting_queue import WaitingQueue
from cb_backend.errors import ErrorInfo, PromptTooLongError


class Scheduler:
    """`schedule` a step, have it executed, `update` with its result; `add` and `abort` between."""

    def __init__(self, limits: SchedulerLimits, policy: Policy) -> None:
        self.limits = limits
        self.token_budget = limits.max_num_batched_tokens  # of a step; may be lowered at run time
        self.roster = Roster(policy)
        self.blocks = KVBlocks(limits)
        self.planner = StepPlanner(limits, self.roster, self.blocks)
        self._step = 0

    @property
    def running(self) -> dict[str, Request]:
        return self.roster.running

    @property
    def waiting(self) -> WaitingQueue:
        return self.roster.waiting

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)  # forks wait for one of these

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
        """The next step. Its rows are empty only if there is no work."""
        self._step += 1
        draft = self.planner.draft(self.token_budget)
        return draft.plan(self._step, self.roster.take_retired(), self.blocks)

    def update(
        self, plan: StepPlan, result: StepResult, now: float, seconds: float = 0.0
    ) -> list[TokenEvent]:
        """Take in what `plan` computed in so many seconds, which its requests are charged with;
        returns an event for each request that moved visibly."""
        events = []
        self.blocks.pins.expire(now)
        running, forks = self.roster.running, self.roster.forks
        sampled, failed, step = result.token_ids, result.failed, self._step
        block_size, has_window = self.limits.block_size, self.limits.window is not None
        per_token = seconds / max(plan.num_tokens, 1)
        for request_id, _, num_new, _, samples in plan.rows:
            request = running.get(request_id)
            if request is None:
                continue  # ended while the step ran
            request.device_seconds += num_new * per_token
            request.block_seconds += len(request.block_table) * seconds
            if failed and (error := failed.get(request_id)) is not None:
                events.append(self._finish(request, FinishReason.ERROR, now, error))
                continue
            request.num_computed_tokens += num_new
            if request.num_computed_tokens // block_size > request.num_indexed_blocks:
                self.blocks.index_full(request)
            if samples:
                if request.pin_s and request.num_output_tokens == 0:
                    self.blocks.pins.pin_prompt(request, block_size, now + request.pin_s)
                token_ids, reason = request.append_output(sampled[request_id])
                if forks:
                    self.roster.queue_forks_of(request)  # its prompt is computed now
                if reason is not None:
                    self._leave(request)
                    events.append(self._event(request, token_ids, now, reason, None))
                    continue
                num_cached = request.num_cached_tokens
                event = (request_id, token_ids, step, now, num_cached, None, None, None)
                events.append(event_of(event))
            if has_window:
                self.blocks.release_outside_window(request)
        return events

    def fail(
        self, plan: StepPlan, error: ErrorInfo, now: float, seconds: float = 0.0
    ) -> list[TokenEvent]:
        """End the requests of a step that raised. Nobody else is touched."""
        out = {copy.target for copy in plan.copies if copy.kind is CopyKind.OUT}
        self.blocks.host.discard(out)  # what should have been copied there may not be
        per_token = seconds / max(plan.num_tokens, 1)
        events = []
        for row in plan.rows:
            if (request := self.running.get(row.request_id)) is not None:
                request.charge(row.num_scheduled_tokens * per_token, seconds)
                events.append(self._finish(request, FinishReason.ERROR, now, error))
        return events

    def abort(self, request_id: str, now: float) -> list[TokenEvent]:
        """End a request wherever it is, blocks and all. An unknown id is no error: it has ended."""
        request = self.roster.find(request_id)
        return [] if request is None else [self._finish(request, FinishReason.ABORT, now, None)]

    def _finish(
        self, request: Request, reason: FinishReason, now: float, error: ErrorInfo | None
    ) -> TokenEvent:
        self._leave(request)
        return self._event(request, (), now, reason, error)

    def _leave(self, request: Request) -> None:
        self.blocks.release(request)
        self.roster.end(request)

    def _event(
        self,
        request: Request,
        token_ids: tuple[int, ...],
        now: float,
        reason: FinishReason | None,
        error: ErrorInfo | None,
    ) -> TokenEvent:
        return TokenEvent(
            request.request_id,
            token_ids,
            self._step,
            now,
            request.num_cached_tokens,
            reason,
            error,
            None if reason is None else request.cost(),
        )
