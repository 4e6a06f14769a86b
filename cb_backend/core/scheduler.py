"""Decides what the next step computes. Engine thread only; no clock, no thread, no torch.

There is no prefill and no decode here. Each request has tokens that are known and tokens that are
computed; a step lets it catch up by `min(num_uncomputed_tokens, its share of the token budget)`:
a whole prompt, a chunk of one, or the single token that was sampled last. (vLLM v1's idea.)
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from cb_backend.core.block_pool import BlockPool
from cb_backend.core.prefix_cache import PrefixCache, extend_block_hashes
from cb_backend.core.request import FinishReason, Request, RequestStatus
from cb_backend.core.step_io import Admission, ScheduledRow, StepPlan, StepResult, TokenEvent
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


@dataclass(slots=True)
class _Draft:
    """A step in the making: who gets how many tokens, and how long its block table was before."""

    left: int  # tokens of the budget that nobody has yet
    num_new: dict[str, int] = field(default_factory=dict)
    table_start: dict[str, int] = field(default_factory=dict)
    admitted: list[Request] = field(default_factory=list)
    preempted: bool = False


class Scheduler:
    """First come, first served. The newest running request gives way when blocks run out."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self.limits = limits
        self.pool = BlockPool(limits.num_blocks)
        self.prefix_cache = PrefixCache(self.pool)
        self.waiting: OrderedDict[str, Request] = OrderedDict()
        self.running: dict[str, Request] = {}  # in the order of admission
        self.num_preemptions = 0  # since the start
        self.num_cached_tokens = 0  # prompt tokens that the prefix cache saved, since the start
        self._retired: list[str] = []  # rows the executor still has and must drop
        self._step = 0

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def add(self, request: Request) -> None:
        """Queue a request. Raises PromptTooLongError if even an empty pool cannot hold it."""
        most_tokens = request.num_prompt_tokens + request.max_tokens - 1  # the last is never read
        if self._blocks_for(most_tokens) > self.limits.num_blocks:
            raise PromptTooLongError(
                f"prompt ({request.num_prompt_tokens} tokens) and max_tokens"
                f" ({request.max_tokens}) need {self._blocks_for(most_tokens)} KV blocks, the pool"
                f" has {self.limits.num_blocks} of {self.limits.block_size} tokens",
                field="prompt",
            )
        self.waiting[request.request_id] = request

    def schedule(self) -> StepPlan:
        """The next step. Its rows are empty only if there is no work."""
        self._step += 1
        # One token of the budget is set aside for every running request, so that a long prompt
        # never stops a stream; _give takes it from there.
        draft = _Draft(left=self.limits.max_num_batched_tokens - len(self.running))
        self._continue_running(draft)
        if not draft.preempted:  # what just lost its blocks must not be let in again at once
            self._admit_waiting(draft)
        self._spend_rest(draft)
        return self._plan(draft)

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
            self._index_full_blocks(request, row.num_computed_tokens)
            if row.samples:
                token_ids, reason = request.append_output(result.token_ids[row.request_id])
                events.append(self._event(request, token_ids, now, reason))
                if reason is not None:
                    self._leave(request)
        return events

    def fail(self, plan: StepPlan, error: ErrorInfo, now: float) -> list[TokenEvent]:
        """End the requests of a step that raised. Nobody else is touched."""
        requests = [self.running.get(row.request_id) for row in plan.rows]
        return [
            self._finish(request, FinishReason.ERROR, now, error=error)
            for request in requests
            if request is not None
        ]

    def abort(self, request_id: str, now: float) -> list[TokenEvent]:
        """End a request wherever it is, blocks and all. An unknown id is no error: it has ended."""
        request = self.running.get(request_id) or self.waiting.get(request_id)
        return [] if request is None else [self._finish(request, FinishReason.ABORT, now)]

    # Sharing out the budget, in the order of schedule().

    def _continue_running(self, draft: _Draft) -> None:
        for request in list(self.running.values()):
            if request.status is not RequestStatus.RUNNING:
                continue  # gave way to an older one a moment ago
            chunk = min(request.num_uncomputed_tokens, self.limits.max_prefill_chunk)
            num_new = min(chunk, draft.left + 1)  # the 1 that was set aside
            if self._make_room(request, num_new, draft):
                self._give(request, num_new, draft)
                draft.left += 1

    def _admit_waiting(self, draft: _Draft) -> None:
        promised = sum(self._blocks_missing(request) for request in self.running.values())
        while self.waiting and draft.left > 0 and len(self.running) < self.limits.max_num_seqs:
            request = next(iter(self.waiting.values()))
            shared = self._match_prefix(request)
            # The whole of it must fit beside what the running ones still need to catch up, or it
            # would be preempted in the middle of its prompt.
            missing = self._blocks_for(request.num_tokens) - len(shared)
            taken_from_idle = sum(self.pool.is_idle(block_id) for block_id in shared)
            if missing + taken_from_idle > self.pool.num_available - promised - self._headroom():
                return
            promised += missing
            self._admit(request, shared, draft)
            chunk = min(request.num_uncomputed_tokens, self.limits.max_prefill_chunk)
            num_new = min(chunk, draft.left)
            promised -= self._give(request, num_new, draft)

    def _spend_rest(self, draft: _Draft) -> None:
        """What is left after everyone had a share goes to the oldest that can use more."""
        for request_id, num_new in list(draft.num_new.items()):
            if draft.left == 0:
                return
            request = self.running[request_id]
            more = min(request.num_uncomputed_tokens - num_new, draft.left)
            covered = len(request.block_table) + self.pool.num_available
            more = min(
                more, covered * self.limits.block_size - request.num_computed_tokens - num_new
            )
            if more > 0:
                self._give(request, more, draft)

    def _give(self, request: Request, num_new: int, draft: _Draft) -> int:
        """Add tokens to the request's share of the step; returns the blocks that this took."""
        draft.left -= num_new
        total = draft.num_new.get(request.request_id, 0) + num_new
        draft.num_new[request.request_id] = total
        draft.table_start.setdefault(request.request_id, len(request.block_table))
        missing = self._blocks_for(request.num_computed_tokens + total) - len(request.block_table)
        request.block_table += self.pool.allocate(max(missing, 0))
        return max(missing, 0)

    def _make_room(self, request: Request, num_new: int, draft: _Draft) -> bool:
        """Preempt the newest until `num_new` more tokens fit; False if that was `request`."""
        wanted = self._blocks_for(request.num_computed_tokens + num_new) - len(request.block_table)
        while wanted > self.pool.num_available:
            victim = next(reversed(self.running.values()))
            self._preempt(victim)
            draft.preempted = True
            draft.left += 1
            if victim is request:
                return False
        return True

    def _plan(self, draft: _Draft) -> StepPlan:
        rows = tuple(self._row(request_id, draft) for request_id in draft.num_new)
        retired, self._retired = tuple(self._retired), []
        admitted = tuple(
            Admission(
                request_id=request.request_id,
                token_ids=tuple(request.token_ids),
                num_prompt_tokens=request.num_prompt_tokens,
                num_computed_tokens=request.num_computed_tokens,
                params=request.params,
                seed=request.seed,
            )
            for request in draft.admitted
        )
        return StepPlan(step=self._step, retired=retired, admitted=admitted, rows=rows)

    def _row(self, request_id: str, draft: _Draft) -> ScheduledRow:
        request, num_new = self.running[request_id], draft.num_new[request_id]
        return ScheduledRow(
            request_id=request_id,
            num_computed_tokens=request.num_computed_tokens,
            num_scheduled_tokens=num_new,
            new_block_ids=tuple(request.block_table[draft.table_start[request_id] :]),
            samples=num_new == request.num_uncomputed_tokens,
        )

    # Joining and leaving.

    def _match_prefix(self, request: Request) -> list[int]:
        if not self.limits.enable_prefix_caching:
            return []
        self._extend_hashes(request)
        # The last token must be computed even if its block is known: its logits are wanted.
        num_usable = (request.num_tokens - 1) // self.limits.block_size
        return self.prefix_cache.match(request.block_hashes[:num_usable])

    def _admit(self, request: Request, shared: list[int], draft: _Draft) -> None:
        self.pool.share(shared)
        request.block_table = list(shared)
        request.num_computed_tokens = len(shared) * self.limits.block_size
        if request.status is RequestStatus.WAITING:
            request.num_cached_tokens = request.num_computed_tokens
            self.num_cached_tokens += request.num_cached_tokens
        request.status = RequestStatus.RUNNING
        del self.waiting[request.request_id]
        self.running[request.request_id] = request
        draft.admitted.append(request)
        draft.table_start[request.request_id] = 0

    def _preempt(self, request: Request) -> None:
        """Take everything back; the request is computed again, prompt and output, when it fits."""
        self._leave(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting[request.request_id] = request
        self.waiting.move_to_end(request.request_id, last=False)

    def _leave(self, request: Request) -> None:
        self.pool.release(request.block_table)
        request.block_table = []
        request.status = RequestStatus.FINISHED
        if self.running.pop(request.request_id, None) is not None:
            self._retired.append(request.request_id)
        else:
            del self.waiting[request.request_id]

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
        )

    # Blocks.

    def _index_full_blocks(self, request: Request, computed_before: int) -> None:
        """Make the blocks that this step filled findable."""
        if not self.limits.enable_prefix_caching:
            return
        first = computed_before // self.limits.block_size
        last = request.num_computed_tokens // self.limits.block_size
        if last > first:
            self._extend_hashes(request)
            for index in range(first, last):
                self.prefix_cache.insert(request.block_hashes[index], request.block_table[index])

    def _extend_hashes(self, request: Request) -> None:
        extend_block_hashes(
            request.block_hashes,
            request.token_ids,
            block_size=self.limits.block_size,
            salt=request.cache_salt,
        )

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.limits.block_size)

    def _blocks_missing(self, request: Request) -> int:
        return max(self._blocks_for(request.num_tokens) - len(request.block_table), 0)

    def _headroom(self) -> int:
        """Blocks kept back at admission, so that the running ones can grow for a while."""
        return max(1, self.limits.num_blocks // 100) if self.running else 0
