from __future__ import annotations

from cb_backend.core.recorded_step import decision
from cb_backend.core.sampling_params import SamplingParams
from cb_backend.core.step_io import Admission, BlockCopy, CopyKind, ScheduledRow, StepPlan, StepRows

NUMBERS = {"a": 0, "b": 1, "c": 2}


def test_a_row_of_one_sampled_token_is_its_number_alone() -> None:
    plan = StepPlan(7, (), (), StepRows.of(ScheduledRow("b", 5, 1, (), True)))
    assert decision(plan, 32, NUMBERS) == {"budget": 32, "rows": [1]}


def test_every_other_row_is_written_out() -> None:
    rows = (
        ScheduledRow("a", 0, 4, (8, 9), False),
        ScheduledRow("b", 5, 1, (3,), True),
        ScheduledRow("c", 5, 1, (), False),
    )
    assert decision(StepPlan(7, (), (), StepRows.of(*rows)), 32, NUMBERS)["rows"] == [
        [0, 0, 4, 0, 8, 9],
        [1, 5, 1, 1, 3],
        [2, 5, 1, 0],
    ]


def test_who_comes_who_goes_and_what_is_copied_is_part_of_the_decision() -> None:
    admission = Admission("a", (1, 2), 2, 0, SamplingParams(), 0)
    copies = (BlockCopy(CopyKind.OUT, 4, 0), BlockCopy(CopyKind.IN, 0, 5))
    plan = StepPlan(
        7, ("c",), (admission,), StepRows.of(ScheduledRow("a", 0, 2, (5,), True)), copies
    )
    assert decision(plan, 8, NUMBERS) == {
        "budget": 8,
        "rows": [[0, 0, 2, 1, 5]],
        "admitted": [0],
        "retired": [2],
        "copies": [["out", 4, 0], ["in", 0, 5]],
    }
