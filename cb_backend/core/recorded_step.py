"""A step's decision as JSON data: what a recording keeps, and what a replay is held to.

Requests appear under numbers, in the order of their arrival. Pure; any thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cb_backend.core.step_io import ScheduledRow, StepPlan

FORMAT = 1  # raise it when a line changes its meaning

Json = dict[str, Any]


def decision(plan: StepPlan, token_budget: int, number_of: Mapping[str, int]) -> Json:
    """All that the scheduler chose in this step; what is empty is left out."""
    line: Json = {
        "budget": token_budget,
        "rows": [_row(row, number_of[row.request_id]) for row in plan.rows],
    }
    if plan.admitted:
        line["admitted"] = [number_of[admission.request_id] for admission in plan.admitted]
    if plan.retired:
        line["retired"] = [number_of[request_id] for request_id in plan.retired]
    if plan.copies:
        line["copies"] = [[str(copy.kind), copy.source, copy.target] for copy in plan.copies]
    return line


def _row(row: ScheduledRow, number: int) -> int | list[int]:
    """Number, computed tokens, new tokens, whether it samples, new blocks; the number alone for
    what nearly all rows are: one token that samples and needs no block."""
    if row.samples and row.num_scheduled_tokens == 1 and not row.new_block_ids:
        return number
    return [
        number,
        row.num_computed_tokens,
        row.num_scheduled_tokens,
        int(row.samples),
        *row.new_block_ids,
    ]
