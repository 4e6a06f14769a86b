"""Fills one step: who gets how much of the token budget, who joins, who gives way.

Engine thread only. One equation for all: a request gets `min(num_uncomputed_tokens, its share)`.
"""

from __future__ import annotations

from collections.abc import Iterable

from cb_backend.core.kv_blocks import Found, KVBlocks
from cb_backend.core.request import Request, RequestStatus
from cb_backend.core.roster import Roster
from cb_backend.core.scheduler_limits import SchedulerLimits
from cb_backend.core.step_draft import StepDraft


class StepPlanner:
    """Moves requests between running and waiting, with their blocks, as a step requires."""

    def __init__(self, limits: SchedulerLimits, roster: Roster, blocks: KVBlocks) -> None:
        self._limits = limits
        self._roster = roster
        self._blocks = blocks
        self.num_preemptions = 0  # since the start
        self.num_cached_tokens = 0  # prompt tokens that need not be computed, since the start

    def draft(self, token_budget: int, before: StepDraft) -> StepDraft:
        """The step after `before`; empty only if nothing can be done before one in flight is."""
        draft = StepDraft(left=token_budget)
        self._displace(draft)
        may_join = self._roster.waiting and self._has_seat()
        if may_join or not draft.go_on(before, self._roster.num_changes, self._blocks):
            # One token of the budget is set aside for every running request, so that a long prompt
            # never stops a stream; _continue_running gives it back as it goes.
            draft.left -= len(self._roster.running)
            if self._continue_running(draft):
                self._admit_waiting(draft)
            self._spend_rest(draft)
        draft.num_changes = self._roster.num_changes
        if self._roster.policy.keeps_accounts:
            charged = self._roster.policy.charged
            for request, num_new in zip(draft.requests, draft.shares(), strict=True):
                charged(request, num_new, 0)
        return draft

    def lacks(self, request: Request) -> str:
        """What keeps a waiting request from running; empty when nothing does."""
        if not self._has_seat():
            return f"a seat: {len(self._roster.running)} of {self._limits.max_num_seqs} are taken"
        wanted = self._blocks.num_taken(request, self._look_up(request))
        left = self._num_unpromised(self._roster.running.values()) - self._headroom()
        if wanted > left:
            return f"KV blocks: it needs {wanted}, {max(left, 0)} are not promised to others"
        return ""

    def _displace(self, draft: StepDraft) -> None:
        """Let the first in the queue throw out the last of the running, if the policy says so."""
        while self._roster.waiting and self._roster.running:
            first, last = self._roster.waiting.peek(), self._roster.last()
            if not self._roster.policy.displaces(first, last) or not self.lacks(first):
                return
            self.preempt_last()
            draft.preempted.add(last.request_id)

    def _continue_running(self, draft: StepDraft) -> bool:
        """Serve everyone who runs; False if blocks ran out, so that nobody may join now."""
        num_lost = self.num_preemptions
        block_size, pool = self._limits.block_size, self._blocks.pool
        add, add_computed = draft.requests.append, draft.num_computed_tokens.append
        for request in self._roster.in_order():  # who gives way leaves it at its end
            num_computed = request.num_computed_tokens
            num_known = len(request.token_ids)
            # Hundreds pass here in every step, with one token that is known or on its way and is
            # not the last: what was set aside for it is spent.
            if num_known <= num_computed + 1 < request.most_tokens:
                room = len(request.block_table) * block_size - num_computed - 1  # behind it
                if room < 0 and pool.num_available:
                    self._blocks.grow(request, num_computed + 1)
                    draft.new_block_ids[len(draft.requests)] = (request.block_table[-1],)
                    room += block_size
                if room >= 0:
                    if room == 0:
                        draft.may_fill.append(len(draft.requests))
                    add(request)
                    add_computed(num_computed)
                    request.num_computed_tokens = num_computed + 1
                    continue
            # With all computed the next one is on its way, and is computed unless it is the last.
            num_left = num_known - num_computed or int(num_known + 1 < request.most_tokens)
            draft.left += 1  # what was set aside for it
            if not num_left:
                continue  # it runs until its last token is here, and computes nothing more
            num_new = min(num_left, self._limits.max_prefill_chunk, draft.left)
            if self._make_room(request, num_new, draft):
                draft.give(request, num_new, self._blocks)
                if num_new < num_left:
                    draft.partial.append(request)
        return self.num_preemptions == num_lost

    def _make_room(self, request: Request, num_new: int, draft: StepDraft) -> bool:
        """Have blocks available for its next tokens; False if it was itself the one to give way."""
        while self._missing(request, num_new) > self._blocks.pool.num_available:
            if request is self._roster.last() and self._blocks.pins.drop_oldest():
                continue  # rather than stop the only one that could give way
            if self.preempt_last() is request:
                return False
            draft.left += 1
        return True

    def _admit_waiting(self, draft: StepDraft) -> None:
        if not (self._roster.waiting and self._has_seat()):
            return
        left = self._num_unpromised(draft.partial)
        while self._roster.waiting and draft.left > 0 and self._has_seat():
            request = self._roster.waiting.peek()
            if request.request_id in draft.preempted:
                return  # has just been displaced: not again in the same step
            found = self._look_up(request)
            taken = self._blocks.num_taken(request, found)
            # The whole of it must fit beside what the running ones still need to catch up: else
            # it would be preempted in the middle of its prompt.
            if taken > left - self._headroom():
                if self._roster.running or not self._blocks.pins.drop_oldest():
                    return
                left = self._num_unpromised(draft.partial)
                continue
            left -= taken
            self._admit(request, found, draft)
            chunk = min(self._limits.max_prefill_chunk, draft.left)
            if request.num_uncomputed_tokens > chunk:
                draft.partial.append(request)
            draft.give(request, min(request.num_uncomputed_tokens, chunk), self._blocks)

    def _spend_rest(self, draft: StepDraft) -> None:
        """What is left after everyone had a share goes to the first that can use more."""
        for request in draft.partial:
            if draft.left <= 0:
                return
            num_blocks = len(request.block_table) + self._blocks.pool.num_available
            room = num_blocks * self._limits.block_size - request.num_computed_tokens
            more = min(request.num_uncomputed_tokens, room) - draft.share_of(request)
            if more > 0:
                draft.give(request, min(more, draft.left), self._blocks)

    def _admit(self, request: Request, found: Found, draft: StepDraft) -> None:
        self._blocks.attach(request, found)
        if request.status is RequestStatus.WAITING:
            request.num_cached_tokens = found.num_tokens
            self.num_cached_tokens += found.num_tokens
        self._roster.run(request)
        self._roster.policy.charged(request, 0, found.num_tokens)
        draft.admit(request)

    def preempt_last(self) -> Request:
        """Take everything back from the last in order; what the caches do not keep is computed
        again when it fits."""
        request = self._roster.last()
        self._blocks.release(request)
        self._roster.preempt(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        return request

    def _look_up(self, request: Request) -> Found:
        parent = self._roster.running.get(request.fork_of) if request.fork_of else None
        # A parent that was preempted may be in the middle of its prompt again.
        if parent is not None and parent.num_computed_tokens < request.num_prompt_tokens - 1:
            parent = None
        return self._blocks.find(request, parent)

    def _has_seat(self) -> bool:
        return len(self._roster.running) < self._limits.max_num_seqs

    def _num_unpromised(self, behind: Iterable[Request]) -> int:
        """Available blocks less what those who are behind need to catch up."""
        promised = sum(self._missing(request, request.num_uncomputed_tokens) for request in behind)
        return self._blocks.pool.num_available - promised

    def _headroom(self) -> int:
        """Blocks kept back at admission, so that the running ones can grow for a while."""
        return max(1, self._blocks.pool.num_blocks // 100) if self._roster.running else 0

    def _missing(self, request: Request, num_new: int) -> int:
        return self._blocks.missing(request, request.num_computed_tokens + num_new)
