"""A step in the making: who gets how many tokens of the budget, and which blocks came with them.

Engine thread only; lives for one `schedule()`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from cb_backend.core.kv_blocks import KVBlocks
from cb_backend.core.request import Request
from cb_backend.core.step_io import Admission, ScheduledRow, StepPlan


@dataclass(slots=True)
class StepDraft:
    """`left` is what nobody has yet of the token budget."""

    left: int
    preempted: set[str] = field(default_factory=set)
    partial: list[Request] = field(default_factory=list)  # could use more than they were given
    _requests: list[Request] = field(default_factory=list)  # as they were first given something
    _num_new: dict[str, int] = field(default_factory=dict)  # of each of them, in the same order
    # The table's length before the step, of those whose table has grown.
    _table_start: dict[str, int] = field(default_factory=dict)
    _admitted: list[Request] = field(default_factory=list)

    def admit(self, request: Request) -> None:
        """It joins in this step: its whole table is new to the executor."""
        self._admitted.append(request)
        self._table_start[request.request_id] = 0

    def give(self, request: Request, num_new: int, blocks: KVBlocks) -> None:
        """Add tokens to the request's share, and the blocks that they need."""
        self.left -= num_new
        request_id = request.request_id
        if request_id in self._num_new:
            num_new += self._num_new[request_id]
        else:
            self._requests.append(request)
        self._num_new[request_id] = num_new
        num_tokens = request.num_computed_tokens + num_new
        if num_tokens > len(request.block_table) * blocks.block_size:
            self._table_start.setdefault(request_id, len(request.block_table))
            blocks.grow(request, num_tokens)

    def share_of(self, request: Request) -> int:
        return self._num_new[request.request_id]

    def shares(self) -> list[tuple[Request, int]]:
        """Each request with what it has so far, in the order in which they were first given."""
        return list(zip(self._requests, self._num_new.values(), strict=True))

    def plan(self, step: int, retired: tuple[str, ...], blocks: KVBlocks) -> StepPlan:
        copies, blocks.copies = tuple(blocks.copies), []
        return StepPlan(
            step=step,
            retired=retired,
            admitted=tuple(_admission(request) for request in self._admitted),
            rows=self._rows(),
            copies=copies,
        )

    def _rows(self) -> tuple[ScheduledRow, ...]:
        rows, starts = [], self._table_start
        for request, num_new in zip(self._requests, self._num_new.values(), strict=True):
            request_id, num_computed = request.request_id, request.num_computed_tokens
            new_block_ids = (
                tuple(request.block_table[starts[request_id] :]) if request_id in starts else ()
            )
            samples = num_computed + num_new == len(request.token_ids)
            rows.append(ScheduledRow(request_id, num_computed, num_new, new_block_ids, samples))
        return tuple(rows)


def _admission(request: Request) -> Admission:
    return Admission(
        request_id=request.request_id,
        token_ids=tuple(request.token_ids),
        num_prompt_tokens=request.num_prompt_tokens,
        num_computed_tokens=request.num_computed_tokens,
        params=request.params,
        seed=request.seed,
    )
