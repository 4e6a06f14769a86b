"""The launches of paged attention that the compile gate makes, by model and rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from cb_kernels import RaggedBatch, paged_attention
from cb_kernels.shared_prefix import PrefixGroup
from cb_kernels.triton.attention import Rule, attend_rows, share
from cb_kernels.triton.attention_plan import Heads, prefix_segment, segments
from cb_kernels.triton.launch import chip
from torch import Tensor

_META = torch.device("meta")

# (queries, keys) of each row.
CHUNKS = ((2048, 2048), (300, 2000), (1, 900))
DECODING = ((1, 4096),) * 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    head_dim: int = 128
    num_heads: int = 32
    num_kv_heads: int = 8
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    float8: bool = False
    rich: bool = False  # window, soft cap and sinks
    deterministic: bool = False


def attention(model: Model, rows: Sequence[tuple[int, int]]) -> None:
    q, cache, batch = _inputs(model, rows)
    paged_attention(
        q,
        cache,
        cache,
        batch,
        scale=0.1,
        sliding_window=1000 if model.rich else None,
        soft_cap=30.0 if model.rich else None,
        sinks=_meta(model.num_heads) if model.rich else None,
        scales=(_meta(model.num_kv_heads), _meta(model.num_kv_heads)) if model.float8 else None,
    )


def shared_prefix(model: Model) -> None:
    """Decoding rows that share a prefix, whether or not it would pay."""
    q, cache, batch = _inputs(model, DECODING)
    heads = Heads(
        *(model.num_heads, model.num_kv_heads, model.head_dim, model.dtype, cache.dtype, None),
        chip(q),
    )
    groups = [PrefixGroup(tuple(range(len(DECODING))), 2048)]
    (segment,) = segments(heads, [1] * len(DECODING), batch.seq_lens)
    shared = share(batch, groups, prefix_segment(heads, groups), len(DECODING))
    scale = _meta(model.num_kv_heads) if model.float8 else None
    rule = Rule(0.1, None, None, None, None, scale, scale)
    rows = batch.rows()
    attend_rows(q, cache, cache, torch.empty_like(q), rows, segment, rule, shared)


def _inputs(model: Model, rows: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor, RaggedBatch]:
    counts = [queries for queries, _ in rows]
    lens = [keys for _, keys in rows]
    q = _meta(sum(counts), model.num_heads, model.head_dim).to(model.dtype)
    shape = (10000, model.block_size, model.num_kv_heads, model.head_dim)
    cache = _meta(*shape).to(torch.float8_e4m3fn if model.float8 else model.dtype)
    width = -(-max(lens) // model.block_size)
    batch = RaggedBatch(
        block_table=torch.arange(len(rows) * width).view(len(rows), width),
        query_start_loc=[sum(counts[:i]) for i in range(len(rows) + 1)],
        seq_lens=lens,
        block_size=model.block_size,
        device=_META,
        deterministic=model.deterministic,
    )
    return q, cache, batch


def _meta(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=_META)
