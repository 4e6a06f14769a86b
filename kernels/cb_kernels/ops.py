"""The public operations: argument checks and the one dispatch rule.

On the CPU the kernels in C take what they can, torch the rest; elsewhere torch takes all.

A cache has the logical shape [N, block_size, H_kv, D] with any strides that keep D contiguous;
physically the heads may lie outside (`torch.empty(H_kv, N, block_size, D).permute(1, 2, 0, 3)`).
Or it is paired, for the kernels in C: see `paired`.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from cb_kernels import paired, torch_impl
from cb_kernels.cpu.library import kernels
from cb_kernels.ragged import RaggedBatch


def attention_path(device_type: str) -> str:
    """The name of the implementation that serves a kind of device."""
    c = kernels() if device_type == "cpu" else None
    return f"paged torch ({device_type})" if c is None else f"paged {c.name} ({device_type})"


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Copy token t's K and V [T, H_kv, D] to slot `slot_mapping[t]`; slot -1 writes nothing.

    Slot s is offset s % block_size of block s // block_size. Slots of a step must be distinct.
    Raises ValueError on shapes or dtypes that do not fit.
    """
    if k_cache.dim() == 5:
        paired.store_kv(k, v, k_cache, v_cache, slot_mapping)
        return
    _check_caches(k_cache, v_cache)
    if (
        k.shape != v.shape
        or k.shape[1:] != k_cache.shape[2:]
        or k.dtype != k_cache.dtype
        or v.dtype != v_cache.dtype
    ):
        raise ValueError(f"k {_text(k)} and v {_text(v)} do not fit a cache {_text(k_cache)}")
    if slot_mapping.shape != k.shape[:1]:
        raise ValueError(f"{k.shape[0]} tokens need as many slots, got {_text(slot_mapping)}")
    c = kernels() if k.device.type == "cpu" else None
    if c is not None and c.takes_store(k_cache, v_cache):
        c.store_kv(k, v, k_cache, v_cache, slot_mapping)
    else:
        torch_impl.store_kv(k, v, k_cache, v_cache, slot_mapping)


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
) -> Tensor:
    """Causal attention [T, H_q, D] of a ragged batch over its pages; this step's K and V included.

    `sliding_window`: a query sees that many latest keys, its own among them. `soft_cap`: scores
    become cap * tanh(score / cap). `sinks` [H_q]: a logit per head that only takes weight away.
    Raises ValueError on shapes or dtypes that do not fit.
    """
    if k_cache.dim() == 5:
        attend = paired.paged_attention
    else:
        _check_attention(q, k_cache, v_cache, batch, sinks)
        c = kernels() if q.device.type == "cpu" else None
        takes = c is not None and c.takes_attention(q, k_cache, v_cache)
        attend = c.attention if takes and c is not None else torch_impl.paged_attention
    return attend(
        q,
        k_cache,
        v_cache,
        batch,
        scale=scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        sinks=sinks,
    )


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension, in x's dtype, which is the weight's."""
    c = kernels() if x.device.type == "cpu" else None
    if c is not None and c.takes_norm(x, weight):
        return c.rms_norm(x, weight, eps)
    return F.rms_norm(x, weight.shape, weight, eps)


def rope(x: Tensor, cos: Tensor, sin: Tensor, half: int) -> Tensor:
    """x [T, H, D], which may be overwritten, with dimension i < half turned against i + half.

    cos and sin [T, 1, D]; sin carries the sign of its half, and past 2 * half cos is 1, sin 0.
    """
    c = kernels() if x.device.type == "cpu" else None
    if c is not None and c.takes_rope(x, cos, half):
        return c.rope(x, cos, sin, half)
    return torch_impl.rope(x, cos, sin, half)


def _check_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: RaggedBatch, sinks: Tensor | None
) -> None:
    _check_caches(k_cache, v_cache)
    if q.dim() != 3 or q.shape[0] != batch.num_tokens or q.dtype != k_cache.dtype:
        raise ValueError(
            f"q {_text(q)} does not fit {batch.num_tokens} tokens and a cache {_text(k_cache)}"
        )
    if q.shape[2] != k_cache.shape[3] or q.shape[1] % k_cache.shape[2]:
        raise ValueError(f"the heads of q {_text(q)} do not fit a cache {_text(k_cache)}")
    if batch.block_size != k_cache.shape[1]:
        raise ValueError(f"blocks of {batch.block_size} do not fit a cache {_text(k_cache)}")
    if sinks is not None and sinks.shape != q.shape[1:2]:
        raise ValueError(f"{q.shape[1]} heads need as many sinks, got {_text(sinks)}")


def _check_caches(k_cache: Tensor, v_cache: Tensor) -> None:
    if k_cache.dim() != 4 or k_cache.shape != v_cache.shape or k_cache.dtype != v_cache.dtype:
        raise ValueError(
            f"caches must be alike and [N, block_size, H_kv, D], got"
            f" {_text(k_cache)} and {_text(v_cache)}"
        )


def _text(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
