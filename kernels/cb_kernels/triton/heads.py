"""What happens to q, k and v between their projection and attention, in one pass over the heads:
the norm of each head of q and k, their rotation, and the store of k and v into the paged cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cb_kernels.triton.launch import chip, launch
from cb_kernels.triton.table import options

Scales = tuple[Tensor, Tensor]


def rope(x: Tensor, cos: Tensor, sin: Tensor, half: int) -> Tensor:
    """See `ops.rope`; x is not overwritten."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(_with_dense_rows(x), out, turns=(cos, sin), half=half)
    return out


def store_heads(
    heads: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    turns: tuple[Tensor, Tensor] | None,
    half: int,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    scales: Scales | None,
) -> Tensor:
    """See `ops.store_heads`."""
    num_q = heads.shape[1] - 2 * k_cache.shape[2]
    shape = (heads.shape[0], num_q, heads.shape[2])
    q = torch.empty(shape, dtype=heads.dtype, device=heads.device)
    caches = (k_cache, v_cache, slot_mapping)
    _launch(
        _with_dense_rows(heads),
        q,
        caches,
        turns=turns,
        half=half,
        norms=norms,
        eps=eps,
        scales=scales,
    )
    return q


def store_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    scales: Scales | None,
) -> None:
    """See `ops.store_kv`."""
    k, v = _with_dense_rows(k), _with_dense_rows(v)
    num_heads, head_dim = k.shape[1:]
    config = options("store_kv", "any", chip(k))
    k_scale, v_scale = scales or (None, None)
    launch(
        _store_kv,
        (triton.cdiv(k.shape[0] * num_heads, config["ROWS"]),),
        *(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale, k.shape[0] * num_heads),
        *(k.stride(0), k.stride(1), v.stride(0), v.stride(1)),
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        HEADS=num_heads,
        WIDTH=head_dim,
        BLOCK=triton.next_power_of_2(head_dim),
        BLOCK_SIZE=k_cache.shape[1],
        **config,
    )


def _launch(
    heads: Tensor,
    q: Tensor,
    caches: tuple[Tensor, Tensor, Tensor] | None = None,
    *,
    turns: tuple[Tensor, Tensor] | None = None,
    half: int = 0,
    norms: tuple[Tensor, Tensor] | None = None,
    eps: float = 0.0,
    scales: Scales | None = None,
) -> None:
    num_tokens, num_heads, head_dim = heads.shape
    if turns is not None:
        turns = (turns[0].contiguous(), turns[1].contiguous())
    k_cache, v_cache, slots = caches or (None, None, None)
    strides: tuple[int, ...] = (0,) * 6
    if k_cache is not None and v_cache is not None:
        strides = (*k_cache.stride()[:3], *v_cache.stride()[:3])
    config = options("store_heads", "any", chip(heads))
    launch(
        _store_heads,
        (triton.cdiv(num_tokens * num_heads, config["ROWS"]),),
        *(heads, q, *(turns or (None, None)), *(norms or (None, None)), k_cache, v_cache, slots),
        *(scales or (None, None)),
        *(num_tokens * num_heads, heads.stride(0), heads.stride(1)),
        0 if turns is None else turns[0].stride(0),
        *strides,
        eps,
        HEADS=num_heads,
        Q_HEADS=q.shape[1],
        KV_HEADS=(num_heads - q.shape[1]) // 2,
        WIDTH=head_dim,
        HALF=half,
        BLOCK=triton.next_power_of_2(head_dim),
        BLOCK_SIZE=1 if k_cache is None else k_cache.shape[1],
        **config,
    )


def _with_dense_rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


@triton.jit
def _as_stored(x, scale, dtype: tl.constexpr):
    """x [ROWS, B] in the cache's dtype; a float8 is divided by its head's scale, and saturates."""
    if dtype == tl.float8e4nv:
        x = tl.clamp(x / scale, -448.0, 448.0)
    return x.to(dtype)


@triton.jit
def _head_scale(scale_ptr, head, inside):
    """The scales [ROWS, 1] of KV heads; 1 where there are none."""
    if scale_ptr is None:
        return 1.0
    else:
        return tl.load(scale_ptr + head, mask=inside, other=1.0)


@triton.jit(do_not_specialize=["num_rows"])
def _store_kv(
    k_ptr,  # [T, HEADS, WIDTH]
    v_ptr,
    k_cache_ptr,  # [N, BLOCK_SIZE, HEADS, WIDTH]
    v_cache_ptr,
    slots_ptr,  # [T]
    k_scale_ptr,  # [HEADS] float32, or None
    v_scale_ptr,
    num_rows,  # T * HEADS
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    k_block_stride,
    k_slot_stride,
    k_cache_head_stride,
    v_block_stride,
    v_slot_stride,
    v_cache_head_stride,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    token, head = row // HEADS, row % HEADS
    slot = tl.load(slots_ptr + token, mask=row < num_rows, other=-1).to(tl.int64)
    stored = slot >= 0
    inside = stored & (column < WIDTH)
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    k_at = k_ptr + token * k_token_stride + head * k_head_stride + column
    k = tl.load(k_at, mask=inside, other=0.0).to(tl.float32)
    k = _as_stored(k, _head_scale(k_scale_ptr, head, stored), k_cache_ptr.dtype.element_ty)
    k_to = block * k_block_stride + offset * k_slot_stride + head * k_cache_head_stride
    tl.store(k_cache_ptr + k_to + column, k, mask=inside)
    v_at = v_ptr + token * v_token_stride + head * v_head_stride + column
    v = tl.load(v_at, mask=inside, other=0.0).to(tl.float32)
    v = _as_stored(v, _head_scale(v_scale_ptr, head, stored), v_cache_ptr.dtype.element_ty)
    v_to = block * v_block_stride + offset * v_slot_stride + head * v_cache_head_stride
    tl.store(v_cache_ptr + v_to + column, v, mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _store_heads(
    heads_ptr,  # [T, HEADS, WIDTH]: those of q, of k and of v
    q_ptr,  # [T, Q_HEADS, WIDTH]
    cos_ptr,  # [T, 1, WIDTH], or None: no rotation
    sin_ptr,
    q_norm_ptr,  # [WIDTH], or None: no norm
    k_norm_ptr,
    k_cache_ptr,  # [N, BLOCK_SIZE, KV_HEADS, WIDTH], or None: all heads are q's
    v_cache_ptr,
    slots_ptr,  # [T]
    k_scale_ptr,  # [KV_HEADS] float32, or None
    v_scale_ptr,
    num_rows,  # T * HEADS
    token_stride,
    head_stride,
    turn_stride,
    k_block_stride,
    k_slot_stride,
    k_head_stride,
    v_block_stride,
    v_slot_stride,
    v_head_stride,
    eps,
    HEADS: tl.constexpr,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,  # dimension i < HALF turns against HALF + i
    BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    token, head = row // HEADS, row % HEADS
    is_v = head >= Q_HEADS + KV_HEADS
    column = tl.arange(0, BLOCK)[None, :]
    partner = tl.where(column < HALF, column + HALF, column - HALF)
    partner = tl.where(column < 2 * HALF, partner, column)
    inside = (row < num_rows) & (column < WIDTH)
    start = heads_ptr + token * token_stride + head * head_stride
    x = tl.load(start + column, mask=inside, other=0.0).to(tl.float32)
    if cos_ptr is not None:
        # Read again, since a tile cannot be indexed: the second time it comes from the L1 cache.
        other = tl.load(start + partner, mask=inside, other=0.0).to(tl.float32)
    if q_norm_ptr is not None:
        rms = tl.where(is_v, 1.0, tl.sqrt(tl.sum(x * x, axis=1)[:, None] / WIDTH + eps))
        x = x / rms * _norm_weight(q_norm_ptr, k_norm_ptr, column, WIDTH, head < Q_HEADS, is_v)
        if cos_ptr is not None:
            other = other / rms
            other *= _norm_weight(q_norm_ptr, k_norm_ptr, partner, WIDTH, head < Q_HEADS, is_v)
    if cos_ptr is not None:
        turns = inside & ~is_v
        cos = tl.load(cos_ptr + token * turn_stride + column, mask=turns, other=1.0)
        sin = tl.load(sin_ptr + token * turn_stride + column, mask=turns, other=0.0)
        x = x * cos.to(tl.float32) + other * sin.to(tl.float32)
    q_to = q_ptr + (token * Q_HEADS + head) * WIDTH
    tl.store(q_to + column, x.to(q_ptr.dtype.element_ty), mask=inside & (head < Q_HEADS))
    if k_cache_ptr is not None:
        slot = tl.load(slots_ptr + token, mask=row < num_rows, other=-1).to(tl.int64)
        block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        is_k = (slot >= 0) & (head >= Q_HEADS) & (head < Q_HEADS + KV_HEADS)
        is_v = (slot >= 0) & is_v
        k_head, v_head = head - Q_HEADS, head - (Q_HEADS + KV_HEADS)
        k = _as_stored(x, _head_scale(k_scale_ptr, k_head, is_k), k_cache_ptr.dtype.element_ty)
        v = _as_stored(x, _head_scale(v_scale_ptr, v_head, is_v), v_cache_ptr.dtype.element_ty)
        k_to = block * k_block_stride + offset * k_slot_stride + k_head * k_head_stride
        v_to = block * v_block_stride + offset * v_slot_stride + v_head * v_head_stride
        tl.store(k_cache_ptr + k_to + column, k, mask=inside & is_k)
        tl.store(v_cache_ptr + v_to + column, v, mask=inside & is_v)


@triton.jit
def _norm_weight(q_norm_ptr, k_norm_ptr, column, WIDTH: tl.constexpr, is_q, is_v):
    """The weights [ROWS, B] of rows of q and of k; v is not normed."""
    q_weight = tl.load(q_norm_ptr + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    k_weight = tl.load(k_norm_ptr + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    return tl.where(is_q, q_weight, tl.where(is_v, 1.0, k_weight))
