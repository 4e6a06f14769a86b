"""In a deterministic batch a token's attention is the same to the bit, whatever is beside it and
however its sequence was cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from cb_kernels import RaggedBatch, reference
from cb_kernels.triton.attention import Rule, attend_rows, layout
from cb_kernels.triton.attention_plan import Heads
from cb_kernels.triton.chips import CHIPS
from torch import Tensor

from tests.kernels.cases import SENTINEL, Case, Inputs, make_inputs

# Two requests: one longer than a fixed part of 1024 keys, one shorter.
LENGTHS = (2100, 75)
CASES = (
    Case("plain", ((2100, 2100), (75, 75)), 2, 1, head_dim=64, block_size=16),
    Case("all", ((2100, 2100), (75, 75)), 3, 1, 80, 48, 1500, soft_cap=2.0, sinks=True),
)

CACHE_DTYPES = (torch.bfloat16, torch.float8_e4m3fn)

# (request, first query, keys) of each row of a step, in any order.
Row = tuple[int, int, int]


def _inputs(case: Case, cache_dtype: torch.dtype) -> Inputs:
    inputs = make_inputs(case, torch.bfloat16)
    caches = {"k_cache": inputs.k_cache.to(cache_dtype), "v_cache": inputs.v_cache.to(cache_dtype)}
    return replace(inputs, **caches)


def _scales(inputs: Inputs) -> tuple[Tensor, Tensor] | None:
    if inputs.k_cache.dtype == torch.bfloat16:
        return None
    return torch.tensor([0.37]), torch.tensor([1.83])  # of K and V; there is one KV head


def _step(inputs: Inputs, case: Case, rows: Sequence[Row]) -> Tensor:
    """The attention of queries [first query, keys) of each row, one row after the other.

    In float32: rounded to bfloat16, a difference of the sums would hardly ever show.
    """
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
    q = inputs.q[torch.cat(tokens)]
    heads = Heads(
        *(case.num_heads, case.num_kv_heads, case.head_dim, q.dtype, inputs.k_cache.dtype),
        case.sliding_window,
        CHIPS["sm_90"],
    )
    rule = Rule(
        case.head_dim**-0.5,
        case.sliding_window,
        case.soft_cap,
        inputs.sinks,
        None,
        *(_scales(inputs) or (None, None)),
    )
    out = torch.full(q.shape, SENTINEL)
    for segment, rows_there in layout(heads, batch).segments:
        stop = starts[segment.last_row]
        caches = (inputs.k_cache, inputs.v_cache)
        attend_rows(q[:stop], *caches, out[:stop], rows_there, segment, rule)
    return out


@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_token_gets_the_same_bits_in_any_step(case: Case, cache_dtype: torch.dtype) -> None:
    inputs = _inputs(case, cache_dtype)
    alone = _step(inputs, case, [(0, 2099, 2100)])[-1]  # decoding, its keys in three parts
    steps: dict[str, Sequence[Row]] = {
        "a chunk": [(0, 2090, 2100)],
        "a chunk cut elsewhere": [(0, 2093, 2100)],
        "decoding beside a chunk": [(1, 0, 75), (0, 2099, 2100)],
        "a chunk beside decoding": [(1, 74, 75), (0, 2070, 2100)],
        "decoding beside decoding": [(1, 74, 75), (0, 2099, 2100)],
    }
    for name, rows in steps.items():
        assert torch.equal(_step(inputs, case, rows)[-1], alone), name


def test_a_prompt_gets_the_same_bits_in_any_chunks() -> None:
    case = CASES[1]
    inputs = _inputs(case, torch.bfloat16)
    whole = _step(inputs, case, [(1, 0, 75)])
    cuts = [0, 1, 30, 31, 62, 75]
    chunks = [
        _step(inputs, case, [(0, 2099, 2100), (1, first, last)])[1:]
        for first, last in pairwise(cuts)
    ]
    assert torch.equal(torch.cat(chunks), whole)


@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES, ids=str)
def test_it_agrees_with_float64(cache_dtype: torch.dtype) -> None:
    case = CASES[1]
    inputs = _inputs(case, cache_dtype)
    actual = _step(inputs, case, [(0, 2095, 2100), (1, 0, 75)])
    batch = RaggedBatch(
        block_table=inputs.batch.block_table,
        query_start_loc=[0, 5, 80],
        seq_lens=[2100, 75],
        block_size=case.block_size,
    )
    expected = reference.paged_attention(
        inputs.q[2095:],
        inputs.k_cache,
        inputs.v_cache,
        batch,
        scale=case.head_dim**-0.5,
        sliding_window=case.sliding_window,
        soft_cap=case.soft_cap,
        sinks=inputs.sinks,
        scales=_scales(inputs),
    )
    torch.testing.assert_close(actual.double(), expected, atol=2e-2, rtol=2e-2)
