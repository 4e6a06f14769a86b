"""A paired cache gives what a plain one gives, and is refused where the kernels do not take it."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from cb_kernels import (
    can_pair,
    paged_attention,
    paired_views,
    plain_views,
    reference,
    store_kv,
)
from torch import Tensor

from tests.kernels.cases import SENTINEL, Case, Inputs, attend, make_inputs
from tests.needs import needs_pairs

pytestmark = needs_pairs
BF16 = torch.bfloat16

_ROWS = ((1, 1), (1, 31), (1, 32), (1, 33), (40, 97), (1, 64), (33, 33), (1, 130), (5, 80), (1, 16))
CASES = [
    Case(f"dim-{dim}-group-{group}-block-{block_size}", _ROWS, 2 * group, 2, dim, block_size)
    for dim, group, block_size in [
        (16, 1, 16),
        (64, 3, 32),
        (80, 2, 48),
        (96, 5, 64),
        (112, 4, 32),
        (128, 8, 128),
        (256, 6, 16),
    ]
]
OPTIONS = [
    dataclasses.replace(CASES[1], name="window-1", sliding_window=1),
    dataclasses.replace(CASES[1], name="window-20", sliding_window=20),
    dataclasses.replace(CASES[1], name="soft-cap", soft_cap=1.5),
    dataclasses.replace(CASES[1], name="sinks", sinks=True),
    dataclasses.replace(CASES[2], name="all", sliding_window=70, soft_cap=2.0, sinks=True),
]


def empty_pair(num_blocks: int, case: Case, value: float) -> tuple[Tensor, Tensor]:
    shape = (2, case.num_kv_heads, num_blocks, case.block_size * case.head_dim)
    return paired_views(*torch.full(shape, value, dtype=BF16), case.block_size)


def paired(inputs: Inputs, case: Case) -> Inputs:
    """The same with its caches paired."""
    k, v = empty_pair(inputs.k_cache.shape[0], case, SENTINEL)
    k.copy_(inputs.k_cache.unflatten(3, (-1, 2)))
    v.copy_(inputs.v_cache.unflatten(1, (-1, 2)))
    return dataclasses.replace(inputs, k_cache=k, v_cache=v)


@pytest.mark.parametrize("case", [*CASES, *OPTIONS], ids=str)
def test_attention_agrees_with_the_reference(case: Case) -> None:
    inputs = make_inputs(case, BF16)
    expected = attend(reference.paged_attention, inputs, case)
    actual = attend(paged_attention, paired(inputs, case), case).double()
    torch.testing.assert_close(actual, expected, atol=4e-2, rtol=4e-2)


@pytest.mark.parametrize("case", [CASES[0], CASES[1], OPTIONS[1]], ids=str)
def test_a_nan_in_a_slot_that_no_row_owns_does_not_leak(case: Case) -> None:
    plain = make_inputs(case, BF16)
    clean = attend(paged_attention, paired(plain, case), case)
    unowned = torch.ones(plain.k_cache.shape[:2], dtype=torch.bool)
    for row, (_, keys) in enumerate(case.rows):
        for p in range(keys):
            block = plain.batch.block_table[row, p // case.block_size]
            unowned[block, p % case.block_size] = False
    plain.k_cache[unowned] = torch.nan
    plain.v_cache[unowned] = torch.nan
    assert torch.equal(attend(paged_attention, paired(plain, case), case), clean)


def test_what_stands_in_a_table_before_the_window_is_not_looked_at() -> None:
    case = Case("window", ((1, 50), (3, 50)), head_dim=16, block_size=16, sliding_window=17)
    inputs = paired(make_inputs(case, BF16), case)
    expected = attend(paged_attention, inputs, case)
    inputs.batch.block_table[0, :2] = -1  # keys 33 to 49 are seen, in blocks 2 and 3
    inputs.batch.block_table[1, :1] = 10**6  # keys 31 to 49
    assert torch.equal(attend(paged_attention, inputs, case), expected)
    inputs.batch.block_table[1, 1] = -1
    with pytest.raises(IndexError, match="does not have"):
        attend(paged_attention, inputs, case)


@pytest.mark.parametrize("case", [CASES[0], CASES[2]], ids=str)
def test_store_agrees_with_the_reference_and_leaves_other_slots_untouched(case: Case) -> None:
    caches = empty_pair(5, case, SENTINEL)
    k, v = torch.randn(2, 6, case.num_kv_heads, case.head_dim).to(BF16)
    slots = torch.tensor([5 * case.block_size - 1, -1, 0, 7, -1, 8])
    expected = reference.store_kv(k, v, *plain_views(*caches), slots)
    store_kv(k, v, *caches, slots)
    for actual, wanted in zip(plain_views(*caches), expected, strict=True):
        assert torch.equal(actual, wanted)
    with pytest.raises(IndexError, match="slot"):
        store_kv(k, v, *caches, slots + 1)


def test_arguments_that_do_not_fit_are_refused() -> None:
    case = CASES[1]
    inputs = paired(make_inputs(case, BF16), case)
    k, v, q = inputs.k_cache, inputs.v_cache, inputs.q
    for wrong in (q[1:], q[:, :5], q[..., :32], q.float()):
        with pytest.raises(ValueError, match="paired cache"):
            paged_attention(wrong, k, v, inputs.batch, scale=1.0)
    for wrong_k, wrong_v in ((k.contiguous(), v), (k, v.contiguous()), (k, v[:1]), (k.float(), v)):
        with pytest.raises(ValueError, match="paired cache"):
            paged_attention(q, wrong_k, wrong_v, inputs.batch, scale=1.0)
    rows = torch.zeros(3, case.num_kv_heads, case.head_dim, dtype=BF16)
    with pytest.raises(ValueError, match="paired cache"):
        store_kv(rows, rows[..., :16], k, v, torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="3 tokens need as many slots"):
        store_kv(rows, rows, k, v, torch.zeros(2, dtype=torch.int64))


def test_what_the_kernels_leave_to_torch_is_not_paired() -> None:
    fits = {"block_size": 32, "head_dim": 64, "group": 3}
    assert can_pair(BF16, **fits)
    assert not can_pair(torch.float32, **fits)
    assert not can_pair(torch.float16, **fits)
    for change in ({"block_size": 24}, {"head_dim": 72}, {"head_dim": 272}, {"group": 65}):
        assert not can_pair(BF16, **(fits | change))
