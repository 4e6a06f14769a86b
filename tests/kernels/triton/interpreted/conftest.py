"""All of this folder runs in Triton's interpreter, with right rounding and checks of memory."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import numpy as np
import pytest
from cb_kernels.triton.launch import INTERPRETED

if not INTERPRETED:
    pytest.exit("set TRITON_INTERPRET=1 before Python starts: `make test-kernels`", returncode=2)

from tests.kernels.triton.harness import memory, rounding

rounding.install()
memory.install()

# The interpreter makes garbage by the million, and each collection went through all of torch's
# objects: five sixths of the time.
gc.collect()
gc.freeze()
gc.set_threshold(50_000, 20, 100)


@pytest.fixture(autouse=True)
def _masked_lanes_may_overflow() -> Iterator[None]:
    with np.errstate(all="ignore"):
        yield


def pytest_unconfigure() -> None:
    gc.unfreeze()  # or nanobind calls all of it leaked
