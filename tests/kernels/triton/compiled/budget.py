"""The budgets: what each kernel of each case may cost, by Triton's minor version.

budget.json holds them as measured when they were last renewed:
`make kernel-budget` renews those of the installed Triton.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

import triton

from tests.kernels.triton.compiled.cases import Case, compiled
from tests.kernels.triton.compiled.measure import Figures, figures

PATH = Path(__file__).with_name("budget.json")
VERSION = ".".join(triton.__version__.split(".")[:2])

# What a row of budget.json holds: the most there may be of each figure.
COLUMNS = ("registers", "shared", "middling", "narrow")


@functools.cache
def measured(case: Case, chip: str) -> dict[str, Figures]:
    """Row's name to figures, for each different kernel that the case launches on the chip."""
    rows: dict[str, Figures] = {}
    for kernel in compiled(case, chip).kernels:
        name = f"{case.name} | {kernel.kernel} | {chip}"
        while name in rows:
            name += " again"
        rows[name] = figures(kernel.binary)
    return rows


def overruns(name: str, row: Figures, budget: dict[str, list[int]]) -> list[str]:
    """What of a measured row is over its budget."""
    if name not in budget:
        return [f"{name}: has no budget for Triton {VERSION}"]
    limits = dict(zip(COLUMNS, budget[name], strict=True))
    return [
        f"{name}: {column} {row[column]}, budget {limits[column]}"
        for column in COLUMNS
        if row[column] > limits[column]
    ]


def load() -> dict[str, list[int]]:
    """Row's name to its figures in the order of COLUMNS, for the installed Triton."""
    return _all().get(VERSION, {})


def save(rows: dict[str, Figures]) -> None:
    budgets = _all()
    budgets[VERSION] = {name: [row[c] for c in COLUMNS] for name, row in sorted(rows.items())}
    text = json.dumps(budgets, indent=1)
    # One line a row, so that a change shows as one.
    lines = text.replace("[\n   ", "[").replace(",\n   ", ", ").replace("\n  ]", "]")
    PATH.write_text(lines + "\n")


def _all() -> dict[str, dict[str, list[int]]]:
    budgets: dict[str, dict[str, list[int]]] = json.loads(PATH.read_text()) if PATH.exists() else {}
    return budgets
