"""Decides what the next step computes. Engine thread only; no clock, no thread, no torch.

There is no prefill and no decode here. Each request has tokens that are known and tokens that are
computed; a step lets it catch up by `min(num_uncomputed_tokens, its share of the token budget)`:
a whole prompt, a chunk of one, or the single token that was sampled last. (vLLM v1's idea.)
"""

from __future__ import annotations

from dataclasses import dataclass

from cb_backend.core.kv_blocks import Found, KVBlocks
from cb_backend.core.policies import Policy
from cb_backend.core.request import FinishReason, Request, RequestStatus
from cb_backend.core.roster import Roster
from cb_backend.core.step_draft import StepDraft
from cb_backend.core.step_io import StepPlan, StepResult, TokenEvent
from cb_backend.core.waiting_queue import WaitingQueue
from cb_backend.errors import ErrorInfo, PromptTooLongError


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """What the scheduler has to share out."""

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int  # at least max_num_seqs
    max_prefill_chunk: int
    enable_prefix_caching: bool
    num_host_blocks: int = 0


class Scheduler:
    """Orders requests by a policy; the last in its order gives way when blocks run out."""

    def __init__(self, limits: SchedulerLimits, policy: Policy) -> None:
        self.limits = limits
        self.token_budget = limits.max_num_batched_tokens  # of a step; may be lowered at run time
        self.blocks = KVBlocks(
            num_blocks=limits.num_blocks,
            block_size=limits.block_size,
            num_host_blocks=limits.num_host_blocks,
            enable_prefix_caching=limits.enable_prefix_caching,
        )
        self.roster = Roster(policy)
        self.num_preemptions = 0  # since the start
        self.num_cached_tokens = 0  # prompt tokens that need not be computed, since the start
        self._retired: list[str] = []  # rows the executor still has and must drop
        self._step = 0

    @property
    def running(self) -> dict[str, Request]:
        return self.roster.running

    @property
    def waiting(self) -> WaitingQueue:
        return self.roster.waiting

    @property
    def policy(self) -> Policy:
        return self.roster.policy

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)  # forks wait for one of these

    def add(self, request: Request) -> None:
        """Queue a request. Raises PromptTooLongError if even an empty pool cannot hold it."""
        most_tokens = request.num_prompt_tokens + request.max_tokens - 1  # the last is never read
        if (wanted := self.blocks.blocks_for(most_tokens)) > self.limits.num_blocks:
            raise PromptTooLongError(
                f"prompt ({request.num_prompt_tokens} tokens) and max_tokens"
                f" ({request.max_tokens}) need {wanted} KV blocks, the pool"
                f" has {self.limits.num_blocks} of {self.limits.block_size} tokens",
                field="prompt",
            )
        self.roster.add(request)

    def schedule(self) -> StepPlan:
        """The next step. Its rows are empty only if there is no work."""
        self._step += 1
        draft = StepDraft(left=self.token_budget)
        self._displace(draft)
        # One token of the budget is set aside for every running request, so that a long prompt
        # never stops a stream; _continue_running gives it back as it goes.
        draft.left -= len(self.running)
        if self._continue_running(draft):
            self._admit_waiting(draft)
        self._spend_rest(draft)
        for request, num_new in draft.shares():
            self.policy.charged(request, num_new, 0)
        retired, self._retired = tuple(self._retired), []
        return draft.plan(self._step, retired, self.blocks)

    def charge(self, plan: StepPlan, seconds: float) -> None:
        """Share out what the step took among its rows, before `update` ends some of them."""
        per_token = seconds / max(plan.num_tokens, 1)
        for row in plan.rows:
            if (request := self.running.get(row.request_id)) is not None:
                request.device_seconds += row.num_scheduled_tokens * per_token
                request.block_seconds += len(request.block_table) * seconds

    def update(self, plan: StepPlan, result: StepResult, now: float) -> list[TokenEvent]:
        """Take in what `plan` computed; returns an event for each request that moved visibly."""
        events = []
        for row in plan.rows:
            request = self.running.get(row.request_id)
            if request is None:
                continue  # ended while the step ran
            if (error := result.failed.get(row.request_id)) is not None:
                events.append(self._finish(request, FinishReason.ERROR, now, error=error))
                continue
            request.num_computed_tokens += row.num_scheduled_tokens
            self.blocks.index_full(request)
            if row.samples:
                token_ids, reason = request.append_output(result.token_ids[row.request_id])
                events.append(self._event(request, token_ids, now, reason))
                self.roster.queue_forks_of(request)  # its prompt is computed now
                if reason is not None:
                    self._leave(request)
        return events

    def fail(self, plan: StepPlan, error: ErrorInfo, now: float) -> list[TokenEvent]:
        """End the requests of a step that raised. Nobody else is touched."""
        self.blocks.forget_failed_copies(plan)
        requests = [self.running.get(row.request_id) for row in plan.rows]
        return [
            self._finish(request, FinishReason.ERROR, now, error=error)
            for request in requests
            if request is not None
        ]

    def abort(self, request_id: str, now: float) -> list[TokenEvent]:
        """End a request wherever it is, blocks and all. An unknown id is no error: it has ended."""
        request = self.roster.find(request_id)
        return [] if request is None else [self._finish(request, FinishReason.ABORT, now)]

    def why_first_waits(self) -> str:
        """What the first in the queue lacks; empty when nothing waits."""
        return (self._lacks(self.waiting.peek()) or "the next step") if self.waiting else ""

    # Sharing out the budget, in the order of schedule().

    def _displace(self, draft: StepDraft) -> None:
        """Let the first in the queue throw out the last of the running, if the policy says so."""
        while self.waiting and self.running:
            first, last = self.waiting.peek(), self.roster.last()
            if not self.policy.displaces(first, last):
                return
            if not self._lacks(first):
                return
            self._preempt(last, draft)

    def _continue_running(self, draft: StepDraft) -> bool:
        """Serve everyone who runs; False if blocks ran out, so that nobody may join now."""
        nobody_lost = True
        for request in self.roster.in_order():
            if request.status is not RequestStatus.RUNNING:
                continue  # gave way to an earlier one a moment ago
            chunk = min(request.num_uncomputed_tokens, self.limits.max_prefill_chunk)
            num_new = min(chunk, draft.left + 1)  # the 1 that was set aside
            while self._missing(request, num_new) > self.blocks.pool.num_available:
                nobody_lost = False
                draft.left += 1
                self._preempt(last := self.roster.last(), draft)
                if last is request:
                    break
            else:
                draft.give(request, num_new, self.blocks)
                draft.left += 1
        return nobody_lost

    def _admit_waiting(self, draft: StepDraft) -> None:
        left = self._num_unpromised()
        while self.waiting and draft.left > 0:
            request = self.waiting.peek()
            if request.request_id in draft.preempted:
                return  # has just been displaced: not again in the same step
            found = self._look_up(request)
            taken = self.blocks.num_taken(request, found)
            # The whole of it must fit beside what the running ones still need to catch up: else
            # it would be preempted in the middle of its prompt.
            if not self._has_seat() or taken > left - self._headroom():
                return
            left -= taken
            self._admit(request, found, draft)
            chunk = min(request.num_uncomputed_tokens, self.limits.max_prefill_chunk)
            draft.give(request, min(chunk, draft.left), self.blocks)

    def _spend_rest(self, draft: StepDraft) -> None:
        """What is left after everyone had a share goes to the first that can use more."""
        for request, num_new in draft.shares():
            if draft.left <= 0:
                return
            room = (len(request.block_table) + self.blocks.pool.num_available) * (
                self.limits.block_size
            )
            more = min(
                request.num_uncomputed_tokens - num_new,
                draft.left,
                room - request.num_computed_tokens - num_new,
            )
            if more > 0:
                draft.give(request, more, self.blocks)

    # Joining and leaving.

    def _look_up(self, request: Request) -> Found:
        parent = self.running.get(request.fork_of) if request.fork_of is not None else None
        # A parent that was preempted may be in the middle of its prompt again. And a fork that has
        # begun has tokens of its own and is like any other.
        if parent is None or parent.num_computed_tokens < request.num_tokens - 1:
            return self.blocks.find(request, None)
        is_new = request.status is RequestStatus.WAITING
        return self.blocks.find(request, parent if is_new else None)

    def _lacks(self, request: Request) -> str:
        """What keeps it from running; empty when nothing does."""
        if not self._has_seat():
            return f"a seat: {len(self.running)} of {self.limits.max_num_seqs} are taken"
        wanted = self.blocks.num_taken(request, self._look_up(request))
        left = self._num_unpromised() - self._headroom()
        if wanted > left:
            return f"KV blocks: it needs {wanted}, {max(left, 0)} are not promised to others"
        return ""

    def _has_seat(self) -> bool:
        return len(self.running) < self.limits.max_num_seqs

    def _num_unpromised(self) -> int:
        """Available blocks less what the running ones need to catch up."""
        promised = sum(self._missing(r, r.num_uncomputed_tokens) for r in self.running.values())
        return self.blocks.pool.num_available - promised

    def _headroom(self) -> int:
        """Blocks kept back at admission, so that the running ones can grow for a while."""
        return max(1, self.limits.num_blocks // 100) if self.running else 0

    def _missing(self, request: Request, num_new: int) -> int:
        return self.blocks.missing(request, request.num_computed_tokens + num_new)

    def _admit(self, request: Request, found: Found, draft: StepDraft) -> None:
        self.blocks.attach(request, found)
        if request.status is RequestStatus.WAITING:
            request.num_cached_tokens = found.num_tokens
            self.num_cached_tokens += found.num_tokens
        self.roster.run(request)
        self.policy.charged(request, 0, found.num_tokens)
        draft.admit(request)

    def _preempt(self, request: Request, draft: StepDraft) -> None:
        """Take everything back; the request is computed again, prompt and output, when it fits."""
        self._take_back(request)
        self.roster.preempt(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        draft.preempted.add(request.request_id)

    def _leave(self, request: Request) -> None:
        if request.request_id in self.running:
            self._take_back(request)
        self.roster.end(request)

    def _take_back(self, request: Request) -> None:
        self.blocks.release(request)
        self._retired.append(request.request_id)

    def _finish(
        self, request: Request, reason: FinishReason, now: float, error: ErrorInfo | None = None
    ) -> TokenEvent:
        self._leave(request)
        return self._event(request, (), now, reason, error)

    def _event(
        self,
        request: Request,
        token_ids: tuple[int, ...],
        now: float,
        reason: FinishReason | None,
        error: ErrorInfo | None = None,
    ) -> TokenEvent:
        return TokenEvent(
            request_id=request.request_id,
            token_ids=token_ids,
            step=self._step,
            time=now,
            num_cached_tokens=request.num_cached_tokens,
            finish_reason=reason,
            error=error,
            cost=None if reason is None else request.cost(),
        )
