"""The public operations: argument checks and the one dispatch rule.

On a GPU the kernels in Triton run (`triton.launch.uses_triton` is the rule). On the CPU the kernels
in C take what they can, torch the rest.

A cache has the logical shape [N, block_size, H_kv, D] with any strides that keep D contiguous;
physically the heads may lie outside (`torch.empty(H_kv, N, block_size, D).permute(1, 2, 0, 3)`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from cb_kernels import paired, torch_impl
from cb_kernels.cpu.library import kernels
from cb_kernels.pointwise import rms_norm
from cb_kernels.ragged import RaggedBatch
from cb_kernels.shapes import shape_text
from cb_kernels.triton.launch import uses_triton


def attention_path(device_type: str) -> str:
    """The name of the implementation that serves a kind of device."""
    if device_type == "cuda":
        return "paged Triton (cuda)"
    c = kernels() if device_type == "cpu" else None
    return f"paged torch ({device_type})" if c is None else f"paged {c.name} ({device_type})"


def store_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    scales: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Copy token t's K and V [T, H_kv, D] to slot `slot_mapping[t]`; slot -1 writes nothing.

    Slot s is offset s % block_size of block s // block_size. Slots of a step must be distinct.
    `scales`: those of K and V, float32 [H_kv], by which a float8 cache's numbers are multiplied
    when they are read. Raises ValueError on shapes or dtypes that do not fit.
    """
    if k_cache.dim() == 5 and scales is None:
        paired.store_kv(k, v, k_cache, v_cache, slot_mapping)
        return
    _check_caches(k_cache, v_cache, scales)
    if (
        k.shape != v.shape
        or k.dtype != v.dtype
        or k.shape[1:] != k_cache.shape[2:]
        or (scales is None and k.dtype != k_cache.dtype)
    ):
        raise ValueError(
            f"k {shape_text(k)} and v {shape_text(v)} do not fit a cache {shape_text(k_cache)}"
        )
    if slot_mapping.shape != k.shape[:1]:
        raise ValueError(f"{k.shape[0]} tokens need as many slots, got {shape_text(slot_mapping)}")
    if uses_triton(k):
        from cb_kernels.triton import heads

        heads.store_kv(k, v, k_cache, v_cache, slot_mapping, scales)
        return
    if scales is not None:
        k, v = torch_impl.as_float8(k, scales[0]), torch_impl.as_float8(v, scales[1])
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
    alibi_slopes: Tensor | None = None,
    scales: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Causal attention [T, H_q, D] of a ragged batch over its pages; this step's K and V included.

    `sliding_window`: a query sees that many latest keys, its own among them. `soft_cap`: scores
    become cap * tanh(score / cap). `sinks` [H_q]: a logit per head that only takes weight away.
    `alibi_slopes` [H_q] float32: a score loses slope * distance between query and key, after the
    cap (Press et al. 2022, arXiv 2108.12409). `scales` [H_kv] float32 of K and of V: what a cache
    in float8_e4m3fn is multiplied with. The last two, and deterministic batches, only a GPU has.
    Raises ValueError on shapes or dtypes that do not fit.
    """
    on_gpu_alone = alibi_slopes is not None or scales is not None or batch.deterministic
    is_paired = k_cache.dim() == 5 and not on_gpu_alone
    if not is_paired:
        _check_caches(k_cache, v_cache, scales)
        _check_queries(q, k_cache, batch, of_cache_dtype=scales is None)
        _check_per_head(q, sinks, "sinks")
        _check_per_head(q, alibi_slopes, "slopes")
        if uses_triton(q):
            from cb_kernels.triton import attention

            of_cache = scales or (None, None)
            rule = attention.Rule(scale, sliding_window, soft_cap, sinks, alibi_slopes, *of_cache)
            return attention.paged_attention(q, k_cache, v_cache, batch, rule)
    if on_gpu_alone:
        raise ValueError(
            f"on the device {q.device.type} there is no ALiBi, float8 cache or deterministic batch"
        )
    return _cpu_attention(q, k_cache, v_cache, is_paired)(
        *(q, k_cache, v_cache, batch),
        scale=scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        sinks=sinks,
    )


def _cpu_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, is_paired: bool
) -> Callable[..., Tensor]:
    if is_paired:
        return paired.paged_attention
    c = kernels() if q.device.type == "cpu" else None
    if c is not None and c.takes_attention(q, k_cache, v_cache):
        return c.attention
    return torch_impl.paged_attention


def rope(x: Tensor, cos: Tensor, sin: Tensor, half: int) -> Tensor:
    """x [T, H, D], which may be overwritten, with dimension i < half turned against i + half.

    cos and sin [T, 1, D], of one angle in both halves; sin carries the sign of its half, and past
    2 * half cos is 1, sin 0.
    """
    if uses_triton(x):
        from cb_kernels.triton import heads

        return heads.rope(x, cos, sin, half)
    c = kernels() if x.device.type == "cpu" else None
    if c is not None and c.takes_rope(x, cos, half):
        return c.rope(x, cos, sin, half)
    return torch_impl.rope(x, cos, sin, half)


def store_heads(
    heads: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    turns: tuple[Tensor, Tensor] | None = None,
    half: int = 0,
    norms: tuple[Tensor, Tensor] | None = None,
    eps: float = 0.0,
    scales: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """From heads [T, H_q + 2 H_kv, D] of q, k and v to q [T, H_q, D], with k and v stored.

    In this order: q and k are normed per head (`norms`: their weights [D]), turned (`turns`: cos
    and sin, with `half`, see `rope`), and k and v stored like `store_kv` does.
    Raises ValueError on shapes or dtypes that do not fit.
    """
    num_kv = k_cache.shape[2]
    num_q = heads.shape[1] - 2 * num_kv
    if num_q < 1:
        raise ValueError(f"heads {shape_text(heads)} are too few for a cache {shape_text(k_cache)}")
    if uses_triton(heads):
        from cb_kernels.triton import heads as kernels_of_heads

        _check_caches(k_cache, v_cache, scales)
        return kernels_of_heads.store_heads(
            *(heads, k_cache, v_cache, slot_mapping),
            turns=turns,
            half=half,
            norms=norms,
            eps=eps,
            scales=scales,
        )
    q, k, v = heads[:, :num_q], heads[:, num_q:-num_kv], heads[:, -num_kv:]
    if norms is not None:
        q, k = rms_norm(q, norms[0], eps), rms_norm(k, norms[1], eps)
    if turns is not None:
        q, k = rope(q, *turns, half), rope(k, *turns, half)
    store_kv(k, v, k_cache, v_cache, slot_mapping, scales)
    return q


def _check_per_head(q: Tensor, values: Tensor | None, name: str) -> None:
    if values is not None and values.shape != q.shape[1:2]:
        raise ValueError(f"{q.shape[1]} heads need as many {name}, got {shape_text(values)}")


def _check_queries(q: Tensor, k_cache: Tensor, batch: RaggedBatch, *, of_cache_dtype: bool) -> None:
    fits = q.dim() == 3 and q.shape[0] == batch.num_tokens
    if not fits or (of_cache_dtype and q.dtype != k_cache.dtype):
        raise ValueError(
            f"q {shape_text(q)} does not fit {batch.num_tokens} tokens"
            f" and a cache {shape_text(k_cache)}"
        )
    if q.shape[2] != k_cache.shape[3] or q.shape[1] % k_cache.shape[2]:
        raise ValueError(f"the heads of q {shape_text(q)} do not fit a cache {shape_text(k_cache)}")
    if batch.block_size != k_cache.shape[1]:
        raise ValueError(f"blocks of {batch.block_size} do not fit a cache {shape_text(k_cache)}")


def _check_caches(
    k_cache: Tensor, v_cache: Tensor, scales: tuple[Tensor, Tensor] | None = None
) -> None:
    if k_cache.dim() != 4 or k_cache.shape != v_cache.shape or k_cache.dtype != v_cache.dtype:
        raise ValueError(
            f"caches must be alike and [N, block_size, H_kv, D], got"
            f" {shape_text(k_cache)} and {shape_text(v_cache)}"
        )
    if scales is None:
        return
    if k_cache.dtype != torch.float8_e4m3fn:
        raise ValueError(f"scales are for a cache in float8_e4m3fn, got {shape_text(k_cache)}")
    for scale in scales:
        if scale.shape != k_cache.shape[2:3] or scale.dtype != torch.float32:
            raise ValueError(f"a scale {shape_text(scale)} does not fit {shape_text(k_cache)}")
