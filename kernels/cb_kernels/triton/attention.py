"""Paged attention of a step: lays the rows out over launches, and makes them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cb_kernels.ragged import RaggedBatch, Rows, to_device
from cb_kernels.shared_prefix import PrefixGroup, prefix_groups
from cb_kernels.triton.attention_kernel import _attend
from cb_kernels.triton.attention_plan import (
    Heads,
    Segment,
    graph_segment,
    pays,
    prefix_segment,
    segments,
)
from cb_kernels.triton.combine import combine
from cb_kernels.triton.launch import chip, launch

_LOG2E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class Rule:
    """What makes attention of scores; each but `scale` may be None."""

    scale: float
    window: int | None
    soft_cap: float | None
    sinks: Tensor | None  # [H_q]
    slopes: Tensor | None  # [H_q] float32
    k_scale: Tensor | None  # [H_kv] float32
    v_scale: Tensor | None  # [H_kv] float32


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Prefixes that are read once, each as a row whose queries are its group's."""

    prefixes: Rows  # [G] groups
    tokens: Tensor  # int32, the groups' tokens one after the other
    first_keys: Tensor  # [S] int32: where each row's own keys begin, in the launch over rows
    segment: Segment
    covers_all: bool  # whether each token has a prefix


@dataclass(frozen=True, slots=True)
class Layout:
    """The launches of a step, the same for all layers that are alike."""

    segments: Sequence[tuple[Segment, Rows]]
    shared: SharedPrefix | None  # of the first segment's rows


@dataclass(frozen=True, slots=True)
class _Parts:
    """Where a launch leaves what it has summed, for `combine`."""

    values: Tensor  # [T, H_q, P, D] float32
    stats: Tensor  # [T, H_q, P, 2] float32


def paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: RaggedBatch, rule: Rule
) -> Tensor:
    """See `ops.paged_attention`."""
    heads = Heads(
        *(q.shape[1], k_cache.shape[2], q.shape[2], q.dtype, k_cache.dtype, rule.window, chip(q))
    )
    has_slopes = rule.slopes is not None
    plan = batch.derived(
        ("triton attention", heads, has_slopes),
        lambda: layout(heads, batch, has_slopes=has_slopes),
    )
    q = q if q.stride(2) == 1 else q.contiguous()
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    shared = plan.shared
    for segment, rows in plan.segments:
        stop = batch.query_start_loc[segment.last_row]
        attend_rows(q[:stop], k_cache, v_cache, out[:stop], rows, segment, rule, shared)
        shared = None
    return out


def layout(heads: Heads, batch: RaggedBatch, *, has_slopes: bool = False) -> Layout:
    """How the batch is laid out over launches, for all layers with such heads."""
    if batch.max_keys is not None:
        num_rows, is_fixed = len(batch.seq_lens), batch.deterministic
        decoding = graph_segment(heads, num_rows, batch.max_keys, deterministic=is_fixed)
        return Layout([(decoding, batch.rows())], None)
    rows = range(len(batch.seq_lens))
    num_queries = [batch.num_queries(row) for row in rows]
    launches = segments(heads, num_queries, batch.seq_lens, deterministic=batch.deterministic)
    pairs = [(segment, _slice(batch.rows(), segment)) for segment in launches]
    # A window hides a prefix from some queries, ALiBi wants each query's place, and fixed parts
    # have an order in which a prefix has no place.
    may_share = heads.window is None and not has_slopes and not batch.deterministic
    if not may_share or not launches or max(num_queries[: launches[0].last_row]) > 1:
        return Layout(pairs, None)
    return Layout(pairs, _shared_prefix(heads, batch, launches[0]))


def attend_rows(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    out: Tensor,
    rows: Rows,
    segment: Segment,
    rule: Rule,
    shared: SharedPrefix | None = None,
) -> None:
    """Write the attention of a segment's rows, which may be padded: a row without queries is
    passed over. q and out [T, H_q, D] end with the last row's tokens."""
    num_prefix_parts = 0 if shared is None else shared.segment.num_parts
    num_parts = num_prefix_parts + segment.num_parts
    if num_parts == 1:
        _launch(q, k_cache, v_cache, out, None, rows, segment, rule)
        return
    shape = (*q.shape[:2], num_parts)
    parts = _Parts(
        torch.empty((*shape, q.shape[2]), dtype=torch.float32, device=q.device),
        torch.empty((*shape, 2), dtype=torch.float32, device=q.device),
    )
    first_keys = None
    if shared is not None:
        if not shared.covers_all:
            parts.stats[:, :, :num_prefix_parts].fill_(-math.inf)
        first_keys = shared.first_keys
        _launch(
            *(q, k_cache, v_cache, out, parts, shared.prefixes, shared.segment, rule),
            tokens=shared.tokens,
        )
    _launch(
        *(q, k_cache, v_cache, out, parts, rows, segment, rule),
        first_keys=first_keys,
        first_part=num_prefix_parts,
    )
    combine(parts.values, parts.stats, out, rule.sinks, in_order=segment.part_tiles > 0)


def _launch(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    out: Tensor,
    parts: _Parts | None,
    rows: Rows,
    segment: Segment,
    rule: Rule,
    *,
    tokens: Tensor | None = None,
    first_keys: Tensor | None = None,
    first_part: int = 0,
) -> None:
    _, page, num_kv_heads, head_dim = k_cache.shape
    num_rows = rows.seq_lens.shape[0]
    num_tokens = q.shape[0] if tokens is None else tokens.shape[0]
    num_parts = 1 if parts is None else parts.stats.shape[2]
    block_q = segment.options["BLOCK_M"] * num_kv_heads // q.shape[1]
    if parts is None:  # written by nobody; None would be another kernel
        unused = torch.empty(1, dtype=torch.float32, device=q.device)
        parts = _Parts(unused, unused)
    launch(
        _attend,
        (num_tokens // block_q + num_rows, num_kv_heads, segment.num_parts),
        *(q, k_cache, v_cache, out, parts.values, parts.stats),
        *(rows.query_start_loc, rows.seq_lens, rows.block_table, tokens, first_keys),
        *(rule.sinks, rule.slopes, rule.k_scale, rule.v_scale),
        *(rule.scale * _LOG2E, rule.soft_cap, rule.window, num_rows, first_part),
        *(num_parts, segment.min_tiles),
        *(q.stride(0), q.stride(1), out.stride(0), out.stride(1), rows.block_table.stride(0)),
        *(*k_cache.stride()[:3], *v_cache.stride()[:3]),
        NUM_HEADS=q.shape[1],
        GROUP=q.shape[1] // num_kv_heads,
        D=head_dim,
        D_PAD=max(16, 2 ** (head_dim - 1).bit_length()),
        PAGE=page,
        PRECISION="ieee",
        CAUSAL=tokens is None,
        PART_TILES=segment.part_tiles,
        **segment.options,
    )


def _slice(rows: Rows, segment: Segment) -> Rows:
    first, last = segment.first_row, segment.last_row
    if first == 0:
        return Rows(rows.block_table[:last], rows.query_start_loc, rows.seq_lens[:last])
    return Rows(
        rows.block_table[first:last], rows.query_start_loc[first:], rows.seq_lens[first:last]
    )


def _shared_prefix(heads: Heads, batch: RaggedBatch, segment: Segment) -> SharedPrefix | None:
    """The prefixes of rows of one query each, if reading them once pays."""
    num_rows = segment.last_row
    groups = prefix_groups(
        batch.block_table,
        [seq_len - 1 for seq_len in batch.seq_lens[:num_rows]],
        block_size=batch.block_size,
        # A row's own keys begin with a tile.
        multiple=math.lcm(batch.block_size, segment.options["BLOCK_N"]),
    )
    if not groups:
        return None
    prefix = prefix_segment(heads, groups)
    if not pays(heads, groups, num_rows, prefix.num_parts + segment.num_parts):
        return None
    return share(batch, groups, prefix, num_rows)


def share(
    batch: RaggedBatch, groups: Sequence[PrefixGroup], prefix: Segment, num_rows: int
) -> SharedPrefix:
    """What the kernel needs to know of groups among the first rows, of one query each."""
    tokens = [batch.query_start_loc[row] for group in groups for row in group.rows]
    starts = [0]
    first_keys = [0] * num_rows
    for group in groups:
        starts.append(starts[-1] + len(group.rows))
        for row in group.rows:
            first_keys[row] = group.num_keys
    num_blocks = -(-max(group.num_keys for group in groups) // batch.block_size)
    table = batch.block_table[[group.rows[0] for group in groups], :num_blocks]
    lens = [group.num_keys for group in groups]
    table, *others = to_device(
        [
            table.to(torch.int32).contiguous(),
            *(torch.tensor(x, dtype=torch.int32) for x in (starts, lens, tokens, first_keys)),
        ],
        batch.device,
    )
    starts_there, lens_there, tokens_there, first_keys_there = others
    return SharedPrefix(
        Rows(table, starts_there, lens_there),
        tokens_there,
        first_keys_there,
        prefix,
        covers_all=len(tokens) == num_rows,
    )
