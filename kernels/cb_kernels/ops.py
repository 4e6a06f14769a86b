"""The public operations on a paged KV cache: argument checks and the one dispatch rule.

A cache has the logical shape [N, block_size, H_kv, D] with any strides that keep D contiguous;
physically the heads may lie outside (`torch.empty(H_kv, N, block_size, D).permute(1, 2, 0, 3)`).
"""

from __future__ import annotations

from torch import Tensor

from cb_kernels import torch_impl
from cb_kernels.ragged import RaggedBatch


def attention_path(device_type: str) -> str:
    """The dispatch rule: the name of the implementation that serves a kind of device."""
    # One implementation so far. A kernel for a device type is added here and nowhere else.
    return f"paged torch ({device_type})"


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Copy token t's K and V [T, H_kv, D] to slot `slot_mapping[t]`; slot -1 writes nothing.

    Slot s is offset s % block_size of block s // block_size. Slots of a step must be distinct.
    Raises ValueError on shapes or dtypes that do not fit.
    """
    _check_caches(k_cache, v_cache)
    if k.shape != v.shape or k.shape[1:] != k_cache.shape[2:] or k.dtype != k_cache.dtype:
        raise ValueError(f"k {_text(k)} and v {_text(v)} do not fit a cache {_text(k_cache)}")
    if slot_mapping.shape != k.shape[:1]:
        raise ValueError(f"{k.shape[0]} tokens need as many slots, got {_text(slot_mapping)}")
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
    return torch_impl.paged_attention(
        q,
        k_cache,
        v_cache,
        batch,
        scale=scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        sinks=sinks,
    )


def _check_caches(k_cache: Tensor, v_cache: Tensor) -> None:
    if k_cache.dim() != 4 or k_cache.shape != v_cache.shape or k_cache.dtype != v_cache.dtype:
        raise ValueError(
            f"caches must be alike and [N, block_size, H_kv, D], got"
            f" {_text(k_cache)} and {_text(v_cache)}"
        )


def _text(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
