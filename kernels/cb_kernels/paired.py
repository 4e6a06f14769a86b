"""A CPU cache that lies as the kernels in C multiply it, so that no step has to turn it first.

The products run on pairs of bfloat16. K of one head's block is [D / 2, block_size] of pairs along
D, V is [block_size / 2, D] of pairs of tokens; the logical views say so by their shapes,
K [N, block_size, H_kv, D / 2, 2] and V [N, block_size / 2, 2, H_kv, D].
"""

from __future__ import annotations

import torch
from torch import Tensor

from cb_kernels.cpu.kernels import Kernels
from cb_kernels.cpu.library import kernels
from cb_kernels.ragged import RaggedBatch
from cb_kernels.shapes import shape_text


def can_pair(dtype: torch.dtype, *, block_size: int, head_dim: int, group: int) -> bool:
    """Whether the kernels take such a cache of a CPU for all that a model may ask; `group` is
    H_q / H_kv."""
    c = kernels()
    return c is not None and c.takes_paired(dtype, block_size, head_dim, group)


def paired_views(k: Tensor, v: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """The logical views of K and V that lie as [H_kv, N, block_size * D] each, in any stride of
    the heads and blocks."""
    k = k.view(*k.shape[:2], -1, block_size, 2).permute(1, 3, 0, 2, 4)
    v = v.view(*v.shape[:2], block_size // 2, -1, 2).permute(1, 2, 4, 0, 3)
    return k, v


def plain_views(k_cache: Tensor, v_cache: Tensor) -> tuple[Tensor, Tensor]:
    """Copies of paired caches as [N, block_size, H_kv, D]."""
    return k_cache.flatten(3), v_cache.flatten(1, 2)


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """See `ops.store_kv`."""
    c = _kernels_for(k, k_cache, v_cache)
    if k.shape != v.shape or k.shape[1:] != _heads(k_cache) or v.dtype != v_cache.dtype:
        raise ValueError(
            f"k {list(k.shape)} and v {list(v.shape)} {v.dtype} do not fit a paired cache"
            f" {list(k_cache.shape)}"
        )
    if slot_mapping.shape != k.shape[:1]:
        raise ValueError(f"{k.shape[0]} tokens need as many slots, got {list(slot_mapping.shape)}")
    c.store_kv_paired(k, v, k_cache, v_cache, slot_mapping)


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
    c = _kernels_for(q, k_cache, v_cache)
    num_kv_heads, head_dim = _heads(k_cache)
    if (
        q.dim() != 3
        or q.shape[0] != batch.num_tokens
        or q.shape[2] != head_dim
        or q.shape[1] % num_kv_heads
        or batch.block_size != k_cache.shape[1]
        or (sinks is not None and sinks.shape != q.shape[1:2])
    ):
        raise ValueError(
            f"q {list(q.shape)} with {batch.num_tokens} tokens, blocks of {batch.block_size} and"
            f" sinks {None if sinks is None else list(sinks.shape)} does not fit a paired cache"
            f" {list(k_cache.shape)}"
        )
    return c.attention(
        q,
        k_cache,
        v_cache,
        batch,
        scale=scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        sinks=sinks,
    )


def check_paired(k_cache: Tensor, v_cache: Tensor) -> None:
    """Raises ValueError unless these lie as `paired_views` makes them."""
    num_blocks, block_size, num_kv_heads = k_cache.shape[:3]
    head_dim = 2 * k_cache.shape[3]
    if (
        k_cache.shape[4] != 2
        or v_cache.shape != (num_blocks, block_size // 2, 2, num_kv_heads, head_dim)
        or v_cache.dtype != k_cache.dtype
        or k_cache.stride()[1::2] != (2, 2 * block_size)
        or v_cache.stride()[1::3] != (2 * head_dim, 2)
        or v_cache.stride(2) != 1
        or k_cache.stride(4) != 1
        or (k_cache.stride(0), k_cache.stride(2)) != (v_cache.stride(0), v_cache.stride(3))
    ):
        raise ValueError(
            f"no paired cache: K {shape_text(k_cache)} of strides {k_cache.stride()},"
            f" V {shape_text(v_cache)} of strides {v_cache.stride()}"
        )


def _heads(k_cache: Tensor) -> tuple[int, int]:
    return k_cache.shape[2], 2 * k_cache.shape[3]


def _kernels_for(x: Tensor, k_cache: Tensor, v_cache: Tensor) -> Kernels:
    """Raises ValueError unless these are caches of `paired_views` that the kernels take."""
    check_paired(k_cache, v_cache)
    c, (num_kv_heads, head_dim) = kernels(), _heads(k_cache)
    group = x.shape[1] // num_kv_heads
    if (
        c is None
        or x.dtype != k_cache.dtype
        or not c.takes_paired(k_cache.dtype, k_cache.shape[1], head_dim, group)
    ):
        raise ValueError(
            f"the kernels do not take {x.dtype} with a paired cache {shape_text(k_cache)}"
        )
    return c
