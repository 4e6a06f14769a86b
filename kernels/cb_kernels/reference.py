"""The paged operations as simply as they can be said: the oracle of every other implementation.

One row, one head, one query at a time, in float64; inputs are never changed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cb_kernels.logits import LogitEdits
from cb_kernels.ragged import RaggedBatch


def store_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    scales: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """New caches like `k_cache` and `v_cache` with the tokens' K and V in their slots."""
    new_k, new_v = k_cache.clone(), v_cache.clone()
    block_size = k_cache.shape[1]
    k_scale, v_scale = scales or (None, None)
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            new_k[slot // block_size, slot % block_size] = _as_stored(k[token], k_cache, k_scale)
            new_v[slot // block_size, slot % block_size] = _as_stored(v[token], v_cache, v_scale)
    return new_k, new_v


def _as_stored(rows: Tensor, cache: Tensor, scale: Tensor | None) -> Tensor:
    """rows [H_kv, D] in the cache's dtype; float8 holds them divided by their head's scale."""
    if scale is not None:
        largest = torch.finfo(cache.dtype).max
        rows = (rows.float() / scale[:, None]).clamp(-largest, largest)
    return rows.to(cache.dtype)


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: RaggedBatch,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    scales: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Causal attention of each row's queries over the row's own pages. Float64 [T, H_q, D]."""
    if scales is not None:
        k_cache, v_cache = (
            cache.double() * factor.double()[:, None]
            for cache, factor in zip((k_cache, v_cache), scales, strict=True)
        )
    out = torch.empty(q.shape, dtype=torch.float64)
    group_size = q.shape[1] // k_cache.shape[2]
    for row, seq_len in enumerate(batch.seq_lens):
        positions = range(seq_len)
        pages = [int(batch.block_table[row, p // batch.block_size]) for p in positions]
        offsets = [p % batch.block_size for p in positions]
        keys = k_cache[pages, offsets].double()  # [seq_len, H_kv, D]
        values = v_cache[pages, offsets].double()
        for i in range(batch.num_queries(row)):
            token = batch.query_start_loc[row] + i
            last = seq_len - batch.num_queries(row) + i
            first = 0 if sliding_window is None else max(0, last - sliding_window + 1)
            for head in range(q.shape[1]):
                kv_head = head // group_size
                scores = keys[first : last + 1, kv_head] @ q[token, head].double() * scale
                if soft_cap is not None:
                    scores = soft_cap * torch.tanh(scores / soft_cap)
                if alibi_slopes is not None:
                    distance = last - torch.arange(first, last + 1)
                    scores = scores - alibi_slopes[head].double() * distance
                if sinks is not None:
                    scores = torch.cat((scores, sinks[head : head + 1].double()))
                weights = torch.softmax(scores, 0)[: last + 1 - first]
                out[token, head] = weights @ values[first : last + 1, kv_head]
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension. Float64."""
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """The norm, float64, of x * scale + residual, rounded to x's dtype; and that sum."""
    total = (x.double() * scale + residual.double()).to(x.dtype)
    return rms_norm(total, weight, eps), total


def rope(x: Tensor, cos: Tensor, sin: Tensor, half: int) -> Tensor:
    """x [T, H, D] with dimension i < half turned against i + half. Float64."""
    x = x.double()
    swapped = torch.cat((x[..., half : 2 * half], x[..., :half], x[..., 2 * half :]), -1)
    return x * cos.double() + swapped * sin.double()


def gated(gate_up: Tensor, activation: str) -> Tensor:
    """act(gate) * up of gate and up side by side; silu, gelu or gelu_tanh. Float64."""
    gate, up = gate_up.double().chunk(2, -1)
    if activation == "silu":
        return torch.nn.functional.silu(gate) * up
    kind = "tanh" if activation == "gelu_tanh" else "none"
    return torch.nn.functional.gelu(gate, approximate=kind) * up


def route(logits: Tensor, top_k: int, *, normalize: bool) -> tuple[Tensor, Tensor]:
    """Weights, float64, and ids [T, top_k] of the largest in a softmax; the first of equals."""
    shares = torch.softmax(logits.double(), -1)
    weights, chosen = (t[:, :top_k] for t in torch.sort(shares, descending=True, stable=True))
    return weights / weights.sum(-1, keepdim=True) if normalize else weights, chosen


def mix_experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    chosen: Tensor,
    *,
    activation: str,
) -> Tensor:
    """The weighted sum of what each token's experts make of it. Float64 [T, H]; what a kernel of
    gate and up, of the activation and of an expert stores is rounded to x's dtype."""
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for token, experts in enumerate(chosen.tolist()):
        for place, expert in enumerate(experts):
            both = (gate_up[expert].double() @ x[token].double()).to(x.dtype)
            inner = gated(both, activation).to(x.dtype)
            y = down[expert].double() @ inner.double() * weights[token, place].double()
            out[token] += y.to(x.dtype)
    return out


def edit_logits(logits: Tensor, edits: LogitEdits) -> Tensor:
    """Mask, bias, then the penalties: repetition, frequency, presence. Float64 [R, V]."""
    out = logits.double().clone()
    vocab = logits.shape[1]
    if edits.allowed is not None:
        out[~_unpacked(edits.allowed, vocab)] = -torch.inf
    if edits.bias is not None:
        for row, (ids, values) in enumerate(zip(*edits.bias, strict=True)):
            kept = ids >= 0
            out[row, ids[kept].long()] += values[kept].double()
    if edits.counts is not None:
        assert edits.prompt is not None
        assert edits.repetition is not None
        assert edits.presence is not None
        assert edits.frequency is not None
        counts = edits.counts.double()
        seen = (counts > 0) | _unpacked(edits.prompt, vocab)
        repetition = edits.repetition.double()[:, None]
        out = torch.where(seen, torch.where(out > 0, out / repetition, out * repetition), out)
        out = out - edits.frequency.double()[:, None] * counts
        out = out - edits.presence.double()[:, None] * (counts > 0)
    return out


def kept_tokens(
    logits: Tensor, *, temperature: float, top_k: int, top_p: float, min_p: float
) -> Tensor:
    """Which tokens [V] of one row's logits [V] may be drawn; equal ones stay in their order."""
    scaled = logits.double() / temperature
    weights = torch.softmax(scaled, 0)
    order = torch.sort(scaled, descending=True, stable=True).indices
    if top_k > 0:
        order = order[:top_k]
    if top_p < 1.0:
        likely = weights[order]
        before = likely.cumsum(0) - likely
        order = order[(before < top_p * likely.sum()) | (torch.arange(len(order)) == 0)]
    kept = torch.zeros(len(logits), dtype=torch.bool)
    kept[order] = True
    return kept & (weights >= min_p * weights.max())


def _unpacked(mask: Tensor, vocab: int) -> Tensor:
    """Bits [R, words * 32] of int32 words as bools [R, vocab]."""
    bits = (mask[:, :, None] >> torch.arange(32)) & 1
    return bits.flatten(1)[:, :vocab].bool()
