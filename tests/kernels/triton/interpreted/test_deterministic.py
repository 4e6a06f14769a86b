"""In a deterministic batch a token's attention is the same to the bit, whatever is beside it and
however its sequence was cut."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from cb_kernels import RaggedBatch, paged_attention, reference
from torch import Tensor

from tests.kernels.cases import Case, Inputs, make_inputs

# Two requests: one longer than a fixed part of 1024 keys, one shorter.
LENGTHS = (1100, 75)
CASES = (
    Case("plain", ((1100, 1100), (75, 75)), 4, 2, head_dim=64, block_size=16),
    Case("all", ((1100, 1100), (75, 75)), 3, 1, 80, 48, 900, soft_cap=2.0, sinks=True),
)

# (request, first query, keys) of each row of a step, in any order.
Row = tuple[int, int, int]


def _step(inputs: Inputs, case: Case, rows: Sequence[Row]) -> Tensor:
    """The attention of queries [first query, keys) of each row, one row after the other."""
    starts = [0]
    tokens = []
    for request, first, keys in rows:
        start = sum(LENGTHS[:request])
        tokens.append(torch.arange(start + first, start + keys))
        starts.append(starts[-1] + keys - first)
    batch = RaggedBatch(
        block_table=inputs.batch.block_table[[request for request, _, _ in rows]],
        query_start_loc=starts,
        seq_lens=[keys for _, _, keys in rows],
        block_size=case.block_size,
        deterministic=True,
    )
    return paged_attention(
        inputs.q[torch.cat(tokens)],
        inputs.k_cache,
        inputs.v_cache,
        batch,
        scale=case.head_dim**-0.5,
        sliding_window=case.sliding_window,
        soft_cap=case.soft_cap,
        sinks=inputs.sinks,
    )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_token_gets_the_same_bits_in_any_step(case: Case) -> None:
    inputs = make_inputs(case, torch.bfloat16)
    alone = _step(inputs, case, [(0, 1099, 1100)])[-1]  # decoding, its keys in two parts
    steps: dict[str, Sequence[Row]] = {
        "a chunk": [(0, 1090, 1100)],
        "a chunk cut elsewhere": [(0, 1093, 1100)],
        "decoding beside a chunk": [(1, 0, 75), (0, 1099, 1100)],
        "a chunk beside decoding": [(1, 74, 75), (0, 1070, 1100)],
        "decoding beside decoding": [(1, 74, 75), (0, 1099, 1100)],
    }
    for name, rows in steps.items():
        assert torch.equal(_step(inputs, case, rows)[-1], alone), name


def test_a_prompt_gets_the_same_bits_in_any_chunks() -> None:
    case = CASES[1]
    inputs = make_inputs(case, torch.bfloat16)
    whole = _step(inputs, case, [(1, 0, 75)])
    cuts = [0, 1, 30, 31, 62, 75]
    chunks = [
        _step(inputs, case, [(0, 1099, 1100), (1, first, last)])[1:]
        for first, last in pairwise(cuts)
    ]
    assert torch.equal(torch.cat(chunks), whole)


def test_it_agrees_with_float64() -> None:
    case = CASES[1]
    inputs = make_inputs(case, torch.bfloat16)
    actual = _step(inputs, case, [(0, 1095, 1100), (1, 0, 75)])
    batch = RaggedBatch(
        block_table=inputs.batch.block_table,
        query_start_loc=[0, 5, 80],
        seq_lens=[1100, 75],
        block_size=case.block_size,
    )
    expected = reference.paged_attention(
        inputs.q[1095:],
        inputs.k_cache,
        inputs.v_cache,
        batch,
        scale=case.head_dim**-0.5,
        sliding_window=case.sliding_window,
        soft_cap=case.soft_cap,
        sinks=inputs.sinks,
    )
    torch.testing.assert_close(actual.double(), expected, atol=2e-2, rtol=2e-2)
