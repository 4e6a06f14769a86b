"""Renew the budgets of the installed Triton, and print what became worse."""

from __future__ import annotations

from tests.kernels.triton.compiled.budget import load, measured, overruns, save
from tests.kernels.triton.compiled.cases import CASES

before = load()
rows = {}
for case in CASES:
    for chip in case.chips:
        found = measured(case, chip)
        rows |= found
        for name, row in found.items():
            if name in before:
                print(*overruns(name, row, before), sep="\n", end="")
save(rows)
print(f"{len(rows)} rows")
