"""Paged attention agrees with float64 to the rounding of its weights and its result, reads nothing
that it should not, and writes nothing else."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from cb_kernels import RaggedBatch, paged_attention, reference
from cb_kernels.ragged import Rows
from cb_kernels.triton.attention import Rule, attend_rows
from cb_kernels.triton.attention_plan import Heads, decode_segment, segments
from cb_kernels.triton.chips import CHIPS
from torch import Tensor

from tests.kernels.cases import SENTINEL, Case, Inputs, attend, make_inputs

# Unit roundoff: half a unit in the last place of a number.
ROUNDOFF = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}

_MIXED = ((1, 1), (17, 17), (1, 70), (33, 100), (1, 200), (5, 64))
_LONG = ((1, 700), (1, 3), (1, 513), (1, 256))

CASES = (
    Case("one-token", ((1, 1),), head_dim=64, block_size=16),
    Case("mixed-16", _MIXED, head_dim=64, block_size=16),
    Case("mixed-blocks-of-128", _MIXED, head_dim=128, block_size=128),
    Case("mixed-blocks-of-24-head-80", _MIXED, head_dim=80, block_size=24),
    Case("mixed-blocks-of-1", ((1, 9), (3, 40)), head_dim=64, block_size=1),
    Case("five-heads-on-one-head-96", _MIXED, 5, 1, head_dim=96, block_size=16),
    Case("no-groups-head-112", _MIXED, 2, 2, head_dim=112, block_size=32),
    Case("head-256", _MIXED, 4, 2, head_dim=256, block_size=16),
    Case("head-16", _MIXED, head_dim=16, block_size=4),
    Case("seventy-heads-on-one", ((1, 30), (3, 90)), 70, 1, head_dim=64, block_size=16),
    Case("window-1", _MIXED, head_dim=64, block_size=16, sliding_window=1),
    Case("window-24", _MIXED, head_dim=64, block_size=16, sliding_window=24),
    Case("window-70-chunk", ((150, 300),), 2, 1, 64, 16, sliding_window=70),
    Case("soft-cap", _MIXED, head_dim=64, block_size=16, soft_cap=1.5),
    Case("sinks", _MIXED, head_dim=64, block_size=16, sinks=True),
    Case("all", _MIXED, 6, 2, 64, 16, sliding_window=40, soft_cap=2.0, sinks=True),
    Case("long-in-parts", _LONG, 8, 2, head_dim=64, block_size=16),
    Case("long-in-parts-all", _LONG, 8, 2, 80, 48, sliding_window=600, soft_cap=2.0, sinks=True),
    Case("chunks-in-parts", ((70, 600), (1, 300)), 6, 2, head_dim=64, block_size=16),
    Case("chunks-in-parts-all", ((70, 700), (1, 300)), 6, 2, 64, 16, 550, 2.0, sinks=True),
    Case("a-few-queries-each", ((4, 300), (3, 5), (2, 2)), 8, 2, head_dim=64, block_size=16),
)


def _attend(
    inputs: Inputs,
    case: Case,
    slopes: Tensor | None = None,
    scales: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    given = functools.partial(paged_attention, alibi_slopes=slopes, scales=scales)
    return attend(given, inputs, case)


def _expected(
    inputs: Inputs,
    case: Case,
    slopes: Tensor | None = None,
    scales: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """In float64, the attention, and how far from it rounding may lead.

    Each weight is rounded before it meets its value, and the result is: so the difference is at
    most a roundoff of the sum of weight * |value|, and one of the result. Else all is in float32.
    """
    given = functools.partial(reference.paged_attention, alibi_slopes=slopes, scales=scales)
    absolute = replace(inputs, v_cache=inputs.v_cache.to(torch.float64).abs())
    exact, sizes = attend(given, inputs, case), attend(given, absolute, case)
    return exact, 1.01 * ROUNDOFF[inputs.q.dtype] * (exact.abs() + sizes) + 2e-6


def _assert_within(actual: Tensor, expected: tuple[Tensor, Tensor]) -> None:
    exact, allowed = expected
    excess = (actual.double() - exact).abs() - allowed
    assert bool((excess <= 0).all()), f"{excess.max().item():.3g} past the bound"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention_agrees_with_float64(case: Case) -> None:
    inputs = make_inputs(case, torch.bfloat16, heads_outside=case.block_size == 24)
    actual = _attend(inputs, case)
    assert actual.dtype == torch.bfloat16
    _assert_within(actual, _expected(inputs, case))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("case", [CASES[15], CASES[17]], ids=str)
def test_other_dtypes_agree_with_float64(case: Case, dtype: torch.dtype) -> None:
    inputs = make_inputs(case, dtype)
    _assert_within(_attend(inputs, case), _expected(inputs, case))


@pytest.mark.parametrize("case", [CASES[1], CASES[15], CASES[16]], ids=str)
def test_alibi_takes_from_a_score_by_distance(case: Case) -> None:
    inputs = make_inputs(case, torch.bfloat16)
    slopes = 2.0 ** -torch.arange(1.0, case.num_heads + 1)
    _assert_within(_attend(inputs, case, slopes), _expected(inputs, case, slopes))


@pytest.mark.parametrize("case", [CASES[2], CASES[3], CASES[17]], ids=str)
def test_a_float8_cache_is_scaled_by_head(case: Case) -> None:
    inputs = make_inputs(case, torch.bfloat16, heads_outside=True)
    inputs = replace(
        inputs,
        k_cache=inputs.k_cache.to(torch.float8_e4m3fn),
        v_cache=inputs.v_cache.to(torch.float8_e4m3fn),
    )
    scales = (torch.rand(case.num_kv_heads) + 0.5, torch.rand(case.num_kv_heads) + 0.5)
    _assert_within(_attend(inputs, case, scales=scales), _expected(inputs, case, scales=scales))


def test_queries_may_lie_between_other_heads() -> None:
    case = CASES[1]
    inputs = make_inputs(case, torch.bfloat16)
    wide = torch.full((inputs.q.shape[0], 10, case.head_dim), SENTINEL, dtype=torch.bfloat16)
    wide[:, 2:8] = inputs.q
    assert torch.equal(_attend(replace(inputs, q=wide[:, 2:8]), case), _attend(inputs, case))


def test_keys_that_no_query_sees_are_not_read() -> None:
    case = Case("window", ((1, 300), (20, 200)), 2, 1, 64, 16, sliding_window=40)
    inputs = make_inputs(case, torch.bfloat16)
    expected = _expected(inputs, case)
    table = inputs.batch.block_table
    # Tiles of 64 keys are read whole, blocks of 16 keys before them not: these do not exist.
    table[0, : (300 - 40) // 64 * 4] = 10**6
    table[1, : (200 - 20 - 40) // 64 * 4] = 10**6
    _assert_within(_attend(inputs, case), expected)


@pytest.mark.parametrize("block_size", [16, 128])
def test_what_lies_past_a_row_may_be_no_number(block_size: int) -> None:
    case = Case("nan", ((1, 65), (2, 2), (1, 257)), 8, 2, head_dim=64, block_size=block_size)
    inputs = make_inputs(case, torch.bfloat16)
    expected = _expected(inputs, case)
    for row, (_, keys) in enumerate(case.rows):
        last = inputs.batch.block_table[row, (keys - 1) // block_size]
        inputs.k_cache[last, (keys - 1) % block_size + 1 :] = torch.nan
        inputs.v_cache[last, (keys - 1) % block_size + 1 :] = torch.nan
    _assert_within(_attend(inputs, case), expected)


@pytest.mark.parametrize("window", [1, 40, 70])
@pytest.mark.parametrize("block_size", [16, 64])
def test_what_lies_before_the_window_may_be_no_number(block_size: int, window: int) -> None:
    """Blocks there are given up, and a tile that the window cuts still reaches into them."""
    case = Case("nan", ((1, 300), (20, 200)), 2, 1, 64, block_size, sliding_window=window)
    inputs = make_inputs(case, torch.bfloat16)
    expected = _expected(inputs, case)
    for row, (queries, keys) in enumerate(case.rows):
        for key in range(keys - queries + 1 - window):
            block = inputs.batch.block_table[row, key // block_size]
            inputs.k_cache[block, key % block_size] = torch.nan
            inputs.v_cache[block, key % block_size] = torch.nan
    _assert_within(_attend(inputs, case), expected)


def _rows(case: Case, inputs: Inputs, padding: int) -> Rows:
    """The rows of decoding requests, and after them some without queries or keys."""
    batch, pad = inputs.batch, [0] * padding
    table = torch.full((len(case.rows) + padding, batch.block_table.shape[1]), 10**6)
    table[: len(case.rows)] = batch.block_table
    starts = batch.query_start_loc
    return Rows(
        table.int(),
        torch.tensor([*starts, *([starts[-1]] * padding)], dtype=torch.int32),
        torch.tensor([*batch.seq_lens, *pad], dtype=torch.int32),
    )


@pytest.mark.parametrize("parts", [1, 5])
def test_padded_rows_of_a_graph_are_passed_over(parts: int) -> None:
    case = CASES[16]
    inputs = make_inputs(case, torch.bfloat16)
    heads = _heads(inputs, case)
    segment = decode_segment(heads, 7, 1024, parts=parts)
    assert segment.num_parts == min(parts, 4)
    q = torch.cat((inputs.q, torch.full((3, *inputs.q.shape[1:]), torch.nan).bfloat16()))
    out = torch.full_like(q, SENTINEL)
    rule = Rule(case.head_dim**-0.5, None, None, None, None, None, None)
    attend_rows(q, inputs.k_cache, inputs.v_cache, out, _rows(case, inputs, 3), segment, rule)
    _assert_within(out[:4], _expected(inputs, case))
    if parts == 1:
        assert bool((out[4:] == SENTINEL).all())


def _heads(inputs: Inputs, case: Case) -> Heads:
    return Heads(
        case.num_heads,
        case.num_kv_heads,
        case.head_dim,
        inputs.q.dtype,
        inputs.k_cache.dtype,
        case.sliding_window,
        CHIPS["sm_90"],
    )


def test_the_long_cases_are_cut_into_parts() -> None:
    inputs = make_inputs(CASES[16], torch.bfloat16)
    (segment,) = segments(_heads(inputs, CASES[16]), [1] * 4, inputs.batch.seq_lens)
    assert segment.num_parts == 2
    for case in CASES[18:20]:
        inputs = make_inputs(case, torch.bfloat16)
        (segment,) = segments(_heads(inputs, case), [70, 1], inputs.batch.seq_lens)
        assert segment.options["PHASES"]
        assert segment.num_parts == 2


def _batch(inputs: Inputs, rows: Sequence[tuple[int, int, int]]) -> RaggedBatch:
    """Of (row, queries, keys): a row of `inputs` with its first keys, the last of them queries."""
    counts = [queries for _, queries, _ in rows]
    return RaggedBatch(
        block_table=inputs.batch.block_table[[row for row, _, _ in rows]],
        query_start_loc=[sum(counts[:i]) for i in range(len(counts) + 1)],
        seq_lens=[keys for _, _, keys in rows],
        block_size=inputs.batch.block_size,
    )


def test_a_long_row_beside_chunks_has_a_launch_of_its_own() -> None:
    case = Case("beside", ((1, 4200), (1, 9), (40, 60)), 2, 1, head_dim=64, block_size=16)
    inputs = make_inputs(case, torch.bfloat16)
    alone, beside = segments(_heads(inputs, case), [1, 1, 40], inputs.batch.seq_lens)
    assert (alone.last_row, beside.first_row) == (2, 2)
    assert alone.num_parts > 1
    _assert_within(_attend(inputs, case), _expected(inputs, case))


def test_no_rows_give_no_attention() -> None:
    inputs = make_inputs(CASES[1], torch.bfloat16)
    empty = replace(inputs, q=inputs.q[:0], batch=_batch(inputs, []))
    assert _attend(empty, CASES[1]).shape == (0, 6, 64)
