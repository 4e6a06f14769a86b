"""The paged operations in plain torch, for any device. Fast where the cache has heads outside.

Decoding rows: gather each group's pages into one dense tensor, fold the query heads of a KV head
into the rows of a matrix product, then matmul, softmax, matmul: measured faster on the CPU than
SDPA over the same gather. Rows of several tokens: SDPA per row.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from cb_kernels.ragged import Chunk, DecodeGroup, RaggedBatch


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """See `ops.store_kv`."""
    if k.device.type != "cpu" or bool((slot_mapping < 0).any()):
        kept = slot_mapping >= 0
        k, v, slot_mapping = k[kept], v[kept], slot_mapping[kept]
    _store(k, k_cache, slot_mapping)
    _store(v, v_cache, slot_mapping)


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: RaggedBatch,
    *,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """See `ops.paged_attention`."""
    out = torch.empty_like(q)
    plan = batch.plan(sliding_window)
    for group in plan.groups:
        _attend_group(q, k_cache, v_cache, group, out, scale, soft_cap, sinks)
    for chunk in plan.chunks:
        if soft_cap is None and sinks is None:
            _attend_chunk(q, k_cache, v_cache, chunk, out, scale)
        else:
            _attend_chunk_explicitly(q, k_cache, v_cache, chunk, out, scale, soft_cap, sinks)
    return out


def _store(rows: Tensor, cache: Tensor, slots: Tensor) -> None:
    """rows [T, H_kv, D] into cache [N, block_size, H_kv, D] at slots [T]."""
    heads_outside = cache.permute(2, 0, 1, 3)
    if heads_outside.is_contiguous():
        flat = heads_outside.view(cache.shape[2], -1, cache.shape[3])
        flat.index_copy_(1, slots, rows.transpose(0, 1))
    else:
        cache.view(-1, *cache.shape[2:]).index_copy_(0, slots, rows)


def _gather(cache: Tensor, pages: Tensor) -> Tensor:
    """cache [N, block_size, H_kv, D] at pages [n, B] as [n, H_kv, B * block_size, D]."""
    num_blocks, block_size, num_heads, head_dim = cache.shape
    n, num_pages = pages.shape
    heads_outside = cache.permute(2, 0, 1, 3)
    if heads_outside.is_contiguous():
        # One row of the flat view is one head's page, so a single copy yields the dense layout.
        offsets = torch.arange(num_heads, device=pages.device)[:, None] * num_blocks
        index = (pages[:, None, :] + offsets).flatten()
        rows = heads_outside.view(num_heads * num_blocks, -1).index_select(0, index)
        return rows.view(n, num_heads, num_pages * block_size, head_dim)
    dense = cache[pages].permute(0, 3, 1, 2, 4)
    return dense.reshape(n, num_heads, num_pages * block_size, head_dim)


def _attend_group(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    group: DecodeGroup,
    out: Tensor,
    scale: float,
    soft_cap: float | None,
    sinks: Tensor | None,
) -> None:
    num_rows, num_heads, head_dim = group.tokens.shape[0], q.shape[1], q.shape[2]
    num_kv_heads = k_cache.shape[2]
    k = _gather(k_cache, group.pages).flatten(0, 1)  # [n * H_kv, L, D]
    v = _gather(v_cache, group.pages).flatten(0, 1)
    folded = q[group.tokens].view(num_rows * num_kv_heads, -1, head_dim)  # [n * H_kv, G, D]
    scores = torch.bmm(folded * scale, k.transpose(1, 2))
    scores = scores.view(num_rows, num_heads, -1)
    bias = None if group.bias is None else group.bias[:, None]
    weights = _softmax(scores, bias, soft_cap, None if sinks is None else sinks[None, :, None])
    attended = torch.bmm(weights.view(num_rows * num_kv_heads, -1, weights.shape[-1]), v)
    out[group.tokens] = attended.view(num_rows, num_heads, head_dim)


def _softmax(
    scores: Tensor, bias: Tensor | None, soft_cap: float | None, sinks: Tensor | None
) -> Tensor:
    """Softmax over the last dimension with an extra logit per head that takes weight away."""
    dtype = scores.dtype
    if soft_cap is not None:
        scores = torch.tanh(scores.float() / soft_cap) * soft_cap
    if bias is not None:
        scores = scores + bias
    if sinks is None:
        # torch sums in float32 inside softmax, whatever the dtype.
        return torch.softmax(scores, -1).to(dtype)
    joined = torch.cat((scores.float(), sinks.float().expand(*scores.shape[:-1], 1)), -1)
    return torch.softmax(joined, -1)[..., :-1].to(dtype)


def _attend_chunk(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, chunk: Chunk, out: Tensor, scale: float
) -> None:
    attended = F.scaled_dot_product_attention(
        q[chunk.start : chunk.stop].transpose(0, 1)[None],
        _gather(k_cache, chunk.pages[None])[:, :, : chunk.num_keys],
        _gather(v_cache, chunk.pages[None])[:, :, : chunk.num_keys],
        attn_mask=chunk.visible,
        is_causal=chunk.visible is None,
        scale=scale,
        enable_gqa=q.shape[1] != k_cache.shape[2],
    )
    out[chunk.start : chunk.stop] = attended[0].transpose(0, 1)


def _attend_chunk_explicitly(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    chunk: Chunk,
    out: Tensor,
    scale: float,
    soft_cap: float | None,
    sinks: Tensor | None,
) -> None:
    """What SDPA has no option for. Float32 throughout."""
    groups = q.shape[1] // k_cache.shape[2]
    k = _gather(k_cache, chunk.pages[None])[0, :, : chunk.num_keys].float()
    v = _gather(v_cache, chunk.pages[None])[0, :, : chunk.num_keys].float()
    queries = q[chunk.start : chunk.stop].float().transpose(0, 1)  # [H_q, n, D]
    scores = torch.matmul(
        queries * scale, k.repeat_interleave(groups, 0).transpose(1, 2)
    )  # [H_q, n, num_keys]
    visible = chunk.visible
    if visible is None:
        visible = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).tril()
    bias = torch.zeros(visible.shape, device=q.device).masked_fill_(~visible, -torch.inf)
    weights = _softmax(scores, bias, soft_cap, None if sinks is None else sinks[:, None, None])
    attended = torch.matmul(weights, v.repeat_interleave(groups, 0))
    out[chunk.start : chunk.stop] = attended.transpose(0, 1)
