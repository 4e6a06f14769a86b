"""Runs the simulation on code with a planted bug in it."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from tests.simulation.mutants import Mutant

PACKAGE = Path(__file__).resolve().parents[2]


_FRESH = (
    "cb_backend.core.",
    "cb_backend.engine.",
    "cb_backend.serving.token_stream",
    "tests.fakes",
    "tests.simulation.",
)


@contextmanager
def planted(mutant: Mutant) -> Iterator[ModuleType]:
    """`tests.simulation.world` on code with the bug in it; the real modules come back after."""
    source = (PACKAGE / (mutant.module.replace(".", "/") + ".py")).read_text()
    if source.count(mutant.old) != 1:
        raise AssertionError(f"{mutant.module} has {source.count(mutant.old)} times: {mutant.old}")
    kept = {name: module for name, module in sys.modules.items() if name.startswith(_FRESH)}
    for name in kept:
        del sys.modules[name]
    try:
        _load(mutant.module, source.replace(mutant.old, mutant.new))
        yield importlib.import_module("tests.simulation.world")
    finally:
        for name in [name for name in sys.modules if name.startswith(_FRESH)]:
            del sys.modules[name]
        sys.modules.update(kept)


def _load(name: str, source: str) -> None:
    spec = importlib.util.spec_from_loader(name, loader=None)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    exec(compile(source, f"<{name}, mutated>", "exec"), module.__dict__)
