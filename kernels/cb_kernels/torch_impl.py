"""The paged operations in plain torch, for any device. Fast where the cache has heads outside.

Decoding rows: gather each group's pages into one dense tensor, fold the query heads of a KV head
into the rows of a matrix product, then matmul, softmax, matmul: measured faster on the CPU than
SDPA over the same gather. Rows of several tokens: SDPA per row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from cb_kernels.ragged import CacheLayout, Chunk, DecodeGroup, RaggedBatch, Workspace


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """See `ops.store_kv`."""
    if k.device.type != "cpu" or bool((slot_mapping < 0).any()):
        kept = slot_mapping >= 0
        k, v, slot_mapping = k[kept], v[kept], slot_mapping[kept]
    _store(k, k_cache, slot_mapping)
    _store(v, v_cache, slot_mapping)


def as_float8(rows: Tensor, scale: Tensor) -> Tensor:
    """rows [T, H_kv, D] divided by their heads' scale [H_kv], saturating."""
    largest = torch.finfo(torch.float8_e4m3fn).max
    return (rows.float() / scale[:, None]).clamp_(-largest, largest).to(torch.float8_e4m3fn)


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
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    layout = CacheLayout.of(k_cache)
    step = _Step(q, k_cache, v_cache, out, layout, batch.workspace, scale, soft_cap, sinks)
    plan = batch.plan(sliding_window, layout)
    for group in plan.groups:
        _attend_group(step, group)
    for chunk in plan.chunks:
        if soft_cap is None and sinks is None:
            _attend_chunk(step, chunk)
        else:
            _attend_chunk_explicitly(step, chunk)
    return out


def rope(x: Tensor, cos: Tensor, sin: Tensor, half: int) -> Tensor:
    """See `ops.rope`."""
    swapped = torch.cat((x[..., half : 2 * half], x[..., :half], x[..., 2 * half :]), -1)
    return torch.addcmul(x * cos, swapped, sin)


@dataclass(frozen=True, slots=True)
class _Step:
    """The arguments of one call, which its parts share."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    out: Tensor
    layout: CacheLayout
    workspace: Workspace
    scale: float
    soft_cap: float | None
    sinks: Tensor | None

    def gather(self, page_index: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
        """K and V [num_rows, H_kv, keys, D], in buffers that the next gather overwrites."""
        return (
            self._gather_one("k", self.k_cache, page_index, num_rows),
            self._gather_one("v", self.v_cache, page_index, num_rows),
        )

    def _gather_one(self, name: str, cache: Tensor, page_index: Tensor, num_rows: int) -> Tensor:
        _, block_size, num_heads, head_dim = cache.shape
        if not self.layout.heads_outside:
            dense = cache[page_index].permute(0, 3, 1, 2, 4)  # [rows, H_kv, B, block_size, D]
            return dense.reshape(num_rows, num_heads, -1, head_dim)
        # A row of the flat view is one head's page, so one copy yields the dense layout.
        flat = cache.permute(2, 0, 1, 3).view(-1, block_size * head_dim)
        buffer = self.workspace.take(name, (page_index.shape[0], flat.shape[1]), cache)
        torch.index_select(flat, 0, page_index, out=buffer)
        return buffer.view(num_rows, num_heads, -1, head_dim)


def _store(rows: Tensor, cache: Tensor, slots: Tensor) -> None:
    """rows [T, H_kv, D] into cache [N, block_size, H_kv, D] at slots [T]."""
    heads_outside = cache.permute(2, 0, 1, 3)
    if heads_outside.is_contiguous():
        flat = heads_outside.view(cache.shape[2], -1, cache.shape[3])
        flat.index_copy_(1, slots, rows.transpose(0, 1))
    else:
        cache.view(-1, *cache.shape[2:]).index_copy_(0, slots, rows)


def _attend_group(step: _Step, group: DecodeGroup) -> None:
    num_heads, head_dim = step.q.shape[1:]
    k, v = (x.flatten(0, 1) for x in step.gather(group.page_index, group.num_rows))
    q = step.q[group.tokens].reshape(k.shape[0], -1, head_dim)  # [n * H_kv, G, D]
    if step.soft_cap is None and group.bias is not None:
        scores = torch.baddbmm(group.bias, q, k.transpose(1, 2), alpha=step.scale)
    else:
        scores = torch.bmm(q * step.scale, k.transpose(1, 2))  # [n * H_kv, G, L]
        if step.soft_cap is not None:
            scores = _soft_capped(scores, step.soft_cap)
            scores = scores if group.bias is None else scores + group.bias
    by_head = scores.view(group.num_rows, num_heads, -1)
    weights = _softmax(by_head, step.sinks, head_dimension=1).to(v.dtype)
    attended = torch.bmm(weights.view(scores.shape), v)
    step.out[group.tokens] = attended.view(group.num_rows, num_heads, head_dim)


def _attend_chunk(step: _Step, chunk: Chunk) -> None:
    k, v = step.gather(chunk.page_index, 1)
    attended = F.scaled_dot_product_attention(
        step.q[chunk.start : chunk.stop].transpose(0, 1)[None],
        k[:, :, : chunk.num_keys],
        v[:, :, : chunk.num_keys],
        attn_mask=chunk.visible,
        is_causal=chunk.visible is None,
        scale=step.scale,
        enable_gqa=step.q.shape[1] != k.shape[1],
    )
    step.out[chunk.start : chunk.stop] = attended[0].transpose(0, 1)


def _attend_chunk_explicitly(step: _Step, chunk: Chunk) -> None:
    """What SDPA has no option for. Float32 throughout."""
    k, v = (x[0, :, : chunk.num_keys].float() for x in step.gather(chunk.page_index, 1))
    q = step.q[chunk.start : chunk.stop].float().transpose(0, 1)  # [H_q, n, D]
    copies = q.shape[0] // k.shape[0]
    scores = torch.matmul(q * step.scale, k.repeat_interleave(copies, 0).transpose(1, 2))
    if step.soft_cap is not None:
        scores = _soft_capped(scores, step.soft_cap)
    visible = chunk.visible
    if visible is None:
        visible = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).tril()
    weights = _softmax(scores.masked_fill_(~visible, -torch.inf), step.sinks, head_dimension=0)
    attended = torch.matmul(weights, v.repeat_interleave(copies, 0))  # [H_q, n, D]
    step.out[chunk.start : chunk.stop] = attended.transpose(0, 1)


def _soft_capped(scores: Tensor, cap: float) -> Tensor:
    return torch.tanh(scores.float() / cap) * cap


def _softmax(scores: Tensor, sinks: Tensor | None, *, head_dimension: int) -> Tensor:
    """Softmax over the last of three dimensions, with a logit per head that only takes weight."""
    if sinks is None:
        return torch.softmax(scores, -1)  # sums in float32 inside, whatever the dtype
    shape = [1, 1, 1]
    shape[head_dimension] = -1
    joined = torch.cat((scores.float(), sinks.float().view(shape).expand(*scores.shape[:2], 1)), -1)
    return torch.softmax(joined, -1)[..., :-1]
