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
            for line in overruns(name, row, before) if name in before else ():
                print(line)
save(rows)
print(f"{len(rows)} rows")
