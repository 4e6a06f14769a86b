"""A step in the making: who gets how many tokens of the budget, and which blocks came with them.

Engine thread only; written by one `schedule()`, and read again when its step is over.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from cb_backend.core.cohort import Cohort
from cb_backend.core.kv_blocks import KVBlocks
from cb_backend.core.request import Request
from cb_backend.core.step_io import Admission, NextTokens, StepPlan, StepResult, StepRows

T = TypeVar("T")


@dataclass(slots=True)
class StepDraft:
    """`left` is what nobody has yet of the token budget."""

    left: int
    preempted: set[str] = field(default_factory=set)
    partial: list[Request] = field(default_factory=list)  # could use more than they were given
    # With a row, in the order of the rows: by identity, as an id may be used again in between.
    requests: list[Request] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)  # those of them that join
    num_computed_tokens: list[int] = field(default_factory=list)  # of each, before the step
    # By place, what is not as in nearly all rows: one token that samples and takes no new block.
    num_scheduled_tokens: dict[int, int] = field(default_factory=dict)
    new_block_ids: dict[int, tuple[int, ...]] = field(default_factory=dict)
    samples: dict[int, bool] = field(default_factory=dict)
    may_fill: list[int] = field(default_factory=list)  # places whose tokens may complete a block
    request_ids: tuple[str, ...] = ()  # once it is a plan
    num_changes: int = -1  # of the roster, up to when all had their share
    cohort: Cohort | None = None  # if a step has gone on from this one, or this one from another
    num_on: int = 0  # steps from the cohort's first one
    _places: dict[str, int] = field(default_factory=dict)  # of those that may get more
    # The table's length before the step, of those whose table has grown.
    _table_start: dict[str, int] = field(default_factory=dict)

    def go_on(self, before: StepDraft, num_changes: int, blocks: KVBlocks) -> bool:
        """Be the step that goes on from `before`, given that nobody joins; False, with nothing
        done, if it cannot: see `Cohort`."""
        cohort = before.cohort_now(num_changes, blocks.block_size)
        if cohort is None:
            return False
        num_on = before.num_on + 1
        places = cohort.begin_block(num_on)
        if num_on >= cohort.num_steps or len(places) > blocks.pool.num_available:
            return False
        self.cohort, self.num_on, self.requests = cohort, num_on, before.requests
        block_ids = blocks.grow_each([self.requests[place] for place in places])
        self.new_block_ids = dict(zip(places, zip(block_ids, strict=False), strict=True))
        self.may_fill = cohort.begin_block(num_on + 1)
        add_computed = self.num_computed_tokens.append
        for request in self.requests:
            num_computed = request.num_computed_tokens
            add_computed(num_computed)
            request.num_computed_tokens = num_computed + 1
        return True

    def cohort_now(self, num_changes: int, block_size: int) -> Cohort | None:
        """Of this step, if each had one token that samples, and nothing has changed since."""
        if num_changes != self.num_changes or self._places or not self.requests:
            return None
        if self.cohort is None:
            self.cohort = Cohort.of(self.requests, self.num_computed_tokens, block_size)
        return self.cohort

    def take_in(
        self, num_changes: int, step: int, result: StepResult, now: float, seconds: float
    ) -> NextTokens | None:
        """See `Cohort.take_in`. None also if something has changed since."""
        if self.cohort is None or num_changes != self.num_changes:
            return None
        return self.cohort.take_in(self.num_on, step, result, now, seconds)

    def admit(self, request: Request) -> None:
        """It joins in this step: its whole table is new to the executor."""
        self.admitted.append(request)
        self._table_start[request.request_id] = 0

    def give(self, request: Request, num_new: int, blocks: KVBlocks) -> None:
        """Add tokens to the request's share, and the blocks that they need."""
        request_id, num_computed = request.request_id, request.num_computed_tokens
        self.left -= num_new
        place = self._places.get(request_id)
        if place is None:
            place = self._places[request_id] = len(self.requests)
            self.may_fill.append(place)
            self.requests.append(request)
            self.num_computed_tokens.append(num_computed)
            self.num_scheduled_tokens[place] = 0
        num_new += self.num_scheduled_tokens[place]
        num_tokens = num_computed + num_new
        if num_tokens > len(request.block_table) * blocks.block_size:
            self._table_start.setdefault(request_id, len(request.block_table))
            blocks.grow(request, num_tokens)
        start = self._table_start.get(request_id, len(request.block_table))
        # Past all that is known: the token that the step in flight samples is this row's.
        self.samples[place] = num_tokens >= len(request.token_ids)
        self.num_scheduled_tokens[place] = num_new
        self.new_block_ids[place] = tuple(request.block_table[start:])

    def share_of(self, request: Request) -> int:
        """Of one that was given something by `give`."""
        return self.num_scheduled_tokens[self._places[request.request_id]]

    def shares(self) -> list[int]:
        """The tokens of each row."""
        return _column(1, self.num_scheduled_tokens, len(self.requests))

    def plan(
        self, step: int, retired: tuple[str, ...], blocks: KVBlocks, before: StepDraft
    ) -> StepPlan:
        """Nobody's share changes any more: from here on it counts as computed. `before` is the
        draft of the step before."""
        copies, blocks.copies = tuple(blocks.copies), []
        admitted = tuple(_admission(request) for request in self.admitted)
        for place in self._places.values():
            self.requests[place].num_computed_tokens += self.num_scheduled_tokens[place]
        num_rows = len(self.requests)
        # The same tuple while the same requests run, which is most of the time: thousands of steps
        # are logged.
        if self.requests == before.requests:
            self.request_ids = before.request_ids
        else:
            self.request_ids = tuple([request.request_id for request in self.requests])
        rows = StepRows(
            self.request_ids,
            tuple(self.num_computed_tokens),
            tuple(self.shares()),
            tuple(_column((), self.new_block_ids, num_rows)),
            tuple(_column(True, self.samples, num_rows)),
        )
        return StepPlan(step, retired, admitted, rows, copies)


def _column(usual: T, others: Mapping[int, T], num_rows: int) -> list[T]:
    """A field of all rows, given those in which it is not the usual."""
    column = [usual] * num_rows
    for place, value in others.items():
        column[place] = value
    return column


def _admission(request: Request) -> Admission:
    return Admission(
        request_id=request.request_id,
        token_ids=tuple(request.token_ids),
        num_prompt_tokens=request.num_prompt_tokens,
        num_computed_tokens=request.num_computed_tokens,
        params=request.params,
        seed=request.seed,
    )
