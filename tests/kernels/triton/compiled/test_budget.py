"""Every kernel and every row of the launch table compiles within its budget, without a GPU."""

from __future__ import annotations

import pytest
from cb_kernels.triton.chips import CHIPS
from cb_kernels.triton.table import TABLE, options

from tests.kernels.triton.compiled import budget
from tests.kernels.triton.compiled.cases import CASES, Case, compiled

BUDGET = budget.load()
PAIRS = [
    pytest.param(case, chip, id=f"{case.name}-{chip}") for case in CASES for chip in case.chips
]


@pytest.mark.parametrize(("case", "chip"), PAIRS)
def test_a_case_keeps_its_budget(case: Case, chip: str) -> None:
    rows = budget.measured(case, chip)
    assert [line for name, row in rows.items() for line in budget.overruns(name, row, BUDGET)] == []
    assert {name: row["spills"] for name, row in rows.items() if row["spills"]} == {}
    limit = CHIPS[chip].shared_bytes
    assert {name: row["shared"] for name, row in rows.items() if row["shared"] > limit} == {}
    if case.wide:
        assert all(row["wide"] and not row["narrow"] for row in rows.values()), rows
    if case.wgmma and chip == "sm_90":
        assert any(row["wgmma"] for row in rows.values()), rows


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("kernel", TABLE)
def test_every_row_of_the_launch_table_is_compiled(kernel: str, chip: str) -> None:
    launched = [
        launch.options
        for case in CASES
        if chip in case.chips
        for launch in compiled(case, chip).kernels
        if launch.kernel == f"_{kernel}"
    ]
    for shape_class in TABLE[kernel]:
        row = options(kernel, shape_class, CHIPS[chip])
        assert any(row.items() <= launch.items() for launch in launched), shape_class


def test_no_budget_is_for_a_row_that_is_gone() -> None:
    rows = {name for case in CASES for chip in case.chips for name in budget.measured(case, chip)}
    assert set(BUDGET) == rows


def test_going_over_a_budget_names_the_row() -> None:
    row = {"registers": 41, "shared": 0, "middling": 0, "narrow": 1}
    assert budget.overruns("a", row, {"a": [40, 0, 0, 0]}) == [
        "a: registers 41, budget 40",
        "a: narrow 1, budget 0",
    ]
    assert budget.overruns("a", row, {"a": [41, 8, 0, 1]}) == []
    assert "no budget" in budget.overruns("a", row, {})[0]
