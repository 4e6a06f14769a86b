"""The paged operations agree with the reference on every ragged shape, and check what they get."""

from __future__ import annotations

import pytest
import torch
from cb_kernels import RaggedBatch, paged_attention, reference, store_kv
from cb_kernels.ragged import CacheLayout

from tests.kernels.cases import CASES, SENTINEL, Case, Inputs, attend, make_cache, make_inputs

# bfloat16 keeps 8 bits: of q * k sums, of the weights and of the result.
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 4e-2}


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("heads_outside", [True, False], ids=["heads-outside", "heads-inside"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention_agrees_with_the_reference(
    case: Case, heads_outside: bool, dtype: torch.dtype
) -> None:
    inputs = make_inputs(case, dtype, heads_outside=heads_outside)
    expected = attend(reference.paged_attention, inputs, case)
    tolerance = TOLERANCES[dtype]
    for _ in range(2):  # the second time from the plan and the buffers of the first
        actual = attend(paged_attention, inputs, case)
        assert actual.dtype == dtype
        torch.testing.assert_close(actual.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("case", [CASES[4], CASES[6]], ids=str)
def test_attention_reads_no_key_past_a_row(case: Case) -> None:
    inputs = make_inputs(case)
    clean = attend(paged_attention, inputs, case)
    table, block_size = inputs.batch.block_table, case.block_size
    owned = {
        (int(table[row, p // block_size]), p % block_size)
        for row, (_, keys) in enumerate(case.rows)
        for p in range(keys)
    }
    for block in range(inputs.k_cache.shape[0]):
        for offset in range(block_size):
            if (block, offset) not in owned:
                inputs.k_cache[block, offset] = SENTINEL
                inputs.v_cache[block, offset] = SENTINEL
    torch.testing.assert_close(attend(paged_attention, inputs, case), clean)


def test_rows_in_any_order_give_the_same() -> None:
    case = CASES[4]
    inputs = make_inputs(case)
    expected = attend(paged_attention, inputs, case)
    starts = inputs.batch.query_start_loc
    order = list(range(len(case.rows)))[::-1]
    tokens = torch.cat([torch.arange(starts[row], starts[row + 1]) for row in order])
    counts = [inputs.batch.num_queries(row) for row in order]
    batch = RaggedBatch(
        block_table=inputs.batch.block_table[order],
        query_start_loc=[sum(counts[:i]) for i in range(len(counts) + 1)],
        seq_lens=[inputs.batch.seq_lens[row] for row in order],
        block_size=case.block_size,
    )
    turned = Inputs(inputs.q[tokens], inputs.k_cache, inputs.v_cache, batch, None)
    torch.testing.assert_close(attend(paged_attention, turned, case), expected[tokens])


def test_far_lengths_are_gathered_in_groups() -> None:
    inputs = make_inputs(CASES[-1])
    plan = inputs.batch.plan(None, CacheLayout.of(inputs.k_cache))
    assert [group.num_keys for group in plan.groups] == [600, 8]


@pytest.mark.parametrize("heads_outside", [True, False], ids=["heads-outside", "heads-inside"])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_store_agrees_with_the_reference_and_leaves_other_slots_untouched(
    heads_outside: bool, dtype: torch.dtype
) -> None:
    case = Case("store", ())
    k_cache = make_cache(5, case, dtype, heads_outside=heads_outside).fill_(SENTINEL)
    v_cache = make_cache(5, case, dtype, heads_outside=heads_outside).fill_(SENTINEL)
    k, v = torch.randn(2, 6, case.num_kv_heads, case.head_dim).to(dtype)
    slots = torch.tensor([19, -1, 0, 7, -1, 8])
    expected_k, expected_v = reference.store_kv(k, v, k_cache, v_cache, slots)
    store_kv(k, v, k_cache, v_cache, slots)
    assert torch.equal(k_cache, expected_k)
    assert torch.equal(v_cache, expected_v)
    untouched = torch.ones(20, dtype=torch.bool)
    untouched[slots[slots >= 0]] = False
    assert bool((k_cache.reshape(20, -1)[untouched] == SENTINEL).all())


def test_store_of_padding_alone_writes_nothing() -> None:
    case = Case("store", ())
    cache = make_cache(2, case, torch.float32, heads_outside=True).fill_(SENTINEL)
    rows = torch.randn(3, case.num_kv_heads, case.head_dim)
    store_kv(rows, rows, cache, cache.clone(), torch.tensor([-1, -1, -1]))
    assert bool((cache == SENTINEL).all())


def test_arguments_that_do_not_fit_are_refused() -> None:
    case = CASES[1]
    inputs = make_inputs(case)
    q, cache, batch = inputs.q, inputs.k_cache, inputs.batch
    with pytest.raises(ValueError, match="does not fit 4 tokens"):
        paged_attention(q[:3], cache, cache, batch, scale=1.0)
    with pytest.raises(ValueError, match="heads of q"):
        paged_attention(q[:, :5], cache, cache, batch, scale=1.0)
    with pytest.raises(ValueError, match="need as many sinks"):
        paged_attention(q, cache, cache, batch, scale=1.0, sinks=torch.zeros(5))
    with pytest.raises(ValueError, match="blocks of 4"):
        paged_attention(q, cache[:, :3], cache[:, :3], batch, scale=1.0)
    with pytest.raises(ValueError, match="caches must be alike"):
        paged_attention(q, cache, cache[1:], batch, scale=1.0)
    with pytest.raises(ValueError, match="do not fit a cache"):
        store_kv(q, q, cache, cache, torch.zeros(4, dtype=torch.int64))
    k = torch.zeros(4, 2, 16)
    with pytest.raises(ValueError, match="4 tokens need as many slots"):
        store_kv(k, k, cache, cache, torch.zeros(3, dtype=torch.int64))


@pytest.mark.parametrize(
    ("starts", "lens", "message"),
    [
        ([0, 1], [1, 1], "need 3 query_start_loc"),
        ([0, 1, 2], [1, 9], "more than the table's 2 blocks"),
        ([0, 0, 1], [1, 1], "row 0 has 0 query tokens"),
        ([0, 3, 4], [2, 1], "row 0 has 3 query tokens and 2 keys"),
    ],
)
def test_a_batch_whose_counts_disagree_is_refused(
    starts: list[int], lens: list[int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        RaggedBatch(
            block_table=torch.zeros(2, 2, dtype=torch.int32),
            query_start_loc=starts,
            seq_lens=lens,
            block_size=4,
        )
