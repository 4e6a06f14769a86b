"""Random ragged cases for the paged operations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from cb_kernels import RaggedBatch
from torch import Tensor

SENTINEL = 777.0


@dataclass(frozen=True)
class Case:
    """Rows as (queries, keys); heads and sizes odd on purpose."""

    name: str
    rows: tuple[tuple[int, int], ...]
    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 16
    block_size: int = 4
    sliding_window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Inputs:
    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    batch: RaggedBatch
    sinks: Tensor | None


def make_cache(num_blocks: int, case: Case, dtype: torch.dtype, *, heads_outside: bool) -> Tensor:
    shape = (num_blocks, case.block_size, case.num_kv_heads, case.head_dim)
    cache = torch.randn(shape)
    if heads_outside:
        cache = cache.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)
    return cache.to(dtype)


def make_inputs(
    case: Case, dtype: torch.dtype = torch.float32, *, heads_outside: bool = True, seed: int = 0
) -> Inputs:
    torch.manual_seed(seed)
    counts = [queries for queries, _ in case.rows]
    lens = [keys for _, keys in case.rows]
    widths = [-(-keys // case.block_size) for keys in lens]
    num_blocks = sum(widths) + 3
    order = torch.randperm(num_blocks).tolist()
    # Entries past a row's blocks name a block that does not exist: reading one would show.
    table = torch.full((len(lens), max(widths) + 1), 10**6, dtype=torch.int32)
    for row, width in enumerate(widths):
        table[row, :width] = torch.tensor([order.pop() for _ in range(width)])
    return Inputs(
        q=torch.randn(sum(counts), case.num_heads, case.head_dim).to(dtype),
        k_cache=make_cache(num_blocks, case, dtype, heads_outside=heads_outside),
        v_cache=make_cache(num_blocks, case, dtype, heads_outside=heads_outside),
        batch=RaggedBatch(
            block_table=table,
            query_start_loc=[sum(counts[:i]) for i in range(len(counts) + 1)],
            seq_lens=lens,
            block_size=case.block_size,
        ),
        sinks=torch.randn(case.num_heads) if case.sinks else None,
    )


def attend(operation: Callable[..., Tensor], inputs: Inputs, case: Case) -> Tensor:
    """`operation` is `paged_attention`, of whichever implementation."""
    return operation(
        *(inputs.q, inputs.k_cache, inputs.v_cache, inputs.batch),
        scale=case.head_dim**-0.5,
        sliding_window=case.sliding_window,
        soft_cap=case.soft_cap,
        sinks=inputs.sinks,
    )


_MIXED = ((1, 1), (5, 5), (1, 9), (3, 12), (1, 4), (1, 5), (1, 3), (7, 20), (1, 30))

CASES = (
    Case("one-token", ((1, 1),)),
    Case("block-less-one", ((1, 3), (3, 3))),
    Case("one-block", ((1, 4), (4, 4))),
    Case("block-and-one", ((1, 5), (5, 5))),
    Case("mixed", _MIXED),
    Case("mixed-window-1", _MIXED, sliding_window=1),
    Case("mixed-window-6", _MIXED, sliding_window=6),
    Case("mixed-soft-cap", _MIXED, soft_cap=1.5),
    Case("mixed-sinks", _MIXED, sinks=True),
    Case("mixed-all", _MIXED, sliding_window=5, soft_cap=2.0, sinks=True),
    Case("head-80-five-on-one", _MIXED, num_heads=5, num_kv_heads=1, head_dim=80),
    Case("head-72-no-groups", _MIXED, num_heads=3, num_kv_heads=3, head_dim=72),
    Case("head-256", _MIXED, num_heads=4, num_kv_heads=2, head_dim=256, block_size=3),
    Case("far-lengths-split-in-groups", ((1, 600), (1, 3), (1, 500), (1, 7)), num_heads=2),
)
