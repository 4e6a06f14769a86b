"""Attention that reads a shared prefix once equals the plain one to rounding, and is left alone
where it would not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from cb_kernels import RaggedBatch, paged_attention, reference
from cb_kernels.shared_prefix import PrefixGroup
from cb_kernels.triton import attention, attention_plan
from cb_kernels.triton.attention import Rule, attend_rows, share
from cb_kernels.triton.attention_plan import Heads, prefix_segment, segments
from cb_kernels.triton.chips import CHIPS
from torch import Tensor

from tests.kernels.cases import SENTINEL

DIM, PAGE, HEADS, KV_HEADS = 64, 16, 6, 2


@dataclass(frozen=True)
class Step:
    """Decoding rows, some of which begin with the same blocks."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    batch: RaggedBatch
    sinks: Tensor


def _step(prefixes: Sequence[tuple[int, int]], lens: Sequence[int]) -> Step:
    """Rows of so many keys; `prefixes`: (row, keys) takes the keys' blocks from row 0."""
    torch.manual_seed(0)
    width = -(-max(lens) // PAGE)
    table = torch.randperm(width * len(lens)).view(len(lens), width)
    for row, keys in prefixes:
        table[row, : keys // PAGE] = table[0, : keys // PAGE]
    cache = torch.randn(2, width * len(lens), PAGE, KV_HEADS, DIM).bfloat16()
    batch = RaggedBatch(
        block_table=table.int(),
        query_start_loc=list(range(len(lens) + 1)),
        seq_lens=lens,
        block_size=PAGE,
    )
    q = torch.randn(len(lens), HEADS, DIM).bfloat16()
    return Step(q, cache[0], cache[1], batch, torch.randn(HEADS))


def _heads() -> Heads:
    dtype = torch.bfloat16
    return Heads(HEADS, KV_HEADS, DIM, dtype, dtype, None, CHIPS["sm_90"])


def _attend(step: Step, soft_cap: float | None, sinks: Tensor | None) -> Tensor:
    return paged_attention(
        step.q, step.k_cache, step.v_cache, step.batch, scale=0.2, soft_cap=soft_cap, sinks=sinks
    )


def _expected(step: Step, soft_cap: float | None, sinks: Tensor | None) -> Tensor:
    return reference.paged_attention(
        step.q, step.k_cache, step.v_cache, step.batch, scale=0.2, soft_cap=soft_cap, sinks=sinks
    )


@pytest.mark.parametrize("rich", [False, True], ids=["plain", "soft-cap-and-sinks"])
@pytest.mark.parametrize("all_share", [True, False], ids=["all-share", "some-share"])
def test_a_prefix_read_once_gives_the_same_attention(rich: bool, all_share: bool) -> None:
    lens = [400, 330, 321, 470]
    step = _step([(1, 320), (2, 320)] + ([(3, 320)] if all_share else []), lens)
    soft_cap, sinks = (3.0, step.sinks) if rich else (None, None)
    rows = (0, 1, 2, 3) if all_share else (2, 0, 1)
    groups = [PrefixGroup(rows, 320)]
    prefix = prefix_segment(_heads(), groups)
    (segment,) = segments(_heads(), [1] * 4, lens)
    shared = share(step.batch, groups, prefix, 4)
    assert shared.covers_all == all_share
    out = torch.full_like(step.q, SENTINEL)
    rule = Rule(0.2, None, soft_cap, sinks, None, None, None)
    caches = (step.k_cache, step.v_cache)
    attend_rows(step.q, *caches, out, step.batch.rows(), segment, rule, shared)
    plain = _attend(step, soft_cap, sinks)  # too little to share: it does not pay
    # Both keep weights and results in bfloat16, and round them apart.
    torch.testing.assert_close(out.float(), plain.float(), atol=4e-3, rtol=2**-7)
    expected = _expected(step, soft_cap, sinks)
    difference = (out.double() - expected).abs().max()
    assert difference <= 2 * (plain.double() - expected).abs().max()


def test_what_pays_is_shared_and_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    step = _step([(row, 640) for row in range(1, 10)], [700] * 10)
    expected = _expected(step, None, None)
    assert attention.layout(_heads(), step.batch).shared is None
    monkeypatch.setattr(attention_plan, "_BYTES_OF_A_LAUNCH", 0.0)
    layout = attention.layout(_heads(), step.batch)
    assert layout.shared is not None
    monkeypatch.setattr(attention, "layout", lambda *_, **__: layout)
    # The prefixes have a table of their own; the rows' tables now begin with no blocks.
    step.batch.rows().block_table[:, :40] = 10**6
    torch.testing.assert_close(_attend(step, None, None).double(), expected, atol=1e-2, rtol=2**-7)


@pytest.mark.parametrize("reason", ["window", "alibi", "deterministic", "chunk"])
def test_what_may_not_be_shared_is_not(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_plan, "_BYTES_OF_A_LAUNCH", 0.0)
    step = _step([(row, 640) for row in range(1, 10)], [700] * 10)
    heads = replace(_heads(), window=650 if reason == "window" else None)
    step.batch.deterministic = reason == "deterministic"
    if reason == "chunk":
        step.batch.query_start_loc = [*range(10), 11]
    layout = attention.layout(heads, step.batch, has_slopes=reason == "alibi")
    assert layout.shared is None
