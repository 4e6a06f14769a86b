"""Decoding reads K and V ahead: each stage of the pipeline but the one in use has its buffers."""

from __future__ import annotations

import pytest
from cb_kernels.triton.chips import CHIPS

from tests.kernels.triton.compiled.cases import CASES, Case, compiled

PAIRS = [
    pytest.param(case, chip, id=f"{case.name}-{chip}")
    for case in CASES
    for chip in case.chips
    if case.name.startswith("attention decode") and CHIPS[chip].backend == "cuda"
]


@pytest.mark.parametrize(("case", "chip"), PAIRS)
def test_each_stage_has_buffers_of_its_own(case: Case, chip: str) -> None:
    kernel = next(k for k in compiled(case, chip).kernels if k.kernel == "_attend")
    options = kernel.options
    item_size = 1 if "float8" in case.name else 2
    tile = options["BLOCK_N"] * options["D"] * item_size
    assert options["num_stages"] >= 3
    # Block ids looked up in the iteration that needs them would leave one buffer, whatever the
    # number of stages.
    assert kernel.binary.metadata.shared >= (options["num_stages"] - 1) * 2 * tile
