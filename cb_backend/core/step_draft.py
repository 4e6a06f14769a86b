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
    _requests: dict[str, Request] = field(default_factory=dict)
    _num_new: dict[str, int] = field(default_factory=dict)
    _table_start: dict[str, int] = field(default_factory=dict)  # its length before the step
    _admitted: list[Request] = field(default_factory=list)

    def admit(self, request: Request) -> None:
        """It joins in this step: its whole table is new to the executor."""
        self._admitted.append(request)
        self._table_start[request.request_id] = 0

    def give(self, request: Request, num_new: int, blocks: KVBlocks) -> None:
        """Add tokens to the request's share, and the blocks that they need."""
        self.left -= num_new
        request_id = request.request_id
        self._requests[request_id] = request
        self._num_new[request_id] = self._num_new.get(request_id, 0) + num_new
        self._table_start.setdefault(request_id, len(request.block_table))
        blocks.grow(request, request.num_computed_tokens + self._num_new[request_id])

    def shares(self) -> list[tuple[Request, int]]:
        """Each request with what it has so far, in the order in which they were first given."""
        return [(request, self._num_new[name]) for name, request in self._requests.items()]

    def plan(self, step: int, retired: tuple[str, ...], blocks: KVBlocks) -> StepPlan:
        copies, blocks.copies = tuple(blocks.copies), []
        return StepPlan(
            step=step,
            retired=retired,
            admitted=tuple(_admission(request) for request in self._admitted),
            rows=tuple(self._row(request, num_new) for request, num_new in self.shares()),
            copies=copies,
        )

    def _row(self, request: Request, num_new: int) -> ScheduledRow:
        return ScheduledRow(
            request_id=request.request_id,
            num_computed_tokens=request.num_computed_tokens,
            num_scheduled_tokens=num_new,
            new_block_ids=tuple(request.block_table[self._table_start[request.request_id] :]),
            samples=num_new == request.num_uncomputed_tokens,
        )


def _admission(request: Request) -> Admission:
    return Admission(
        request_id=request.request_id,
        token_ids=tuple(request.token_ids),
        num_prompt_tokens=request.num_prompt_tokens,
        num_computed_tokens=request.num_computed_tokens,
        params=request.params,
        seed=request.seed,
    )
