"""A running softmax over tiles of keys: what `attention_kernel` and `combine` are made of.

`sums` are, for each query, the values weighted so far [M, D_PAD], the maximum of the scores [M] and
the sum of the weights [M], all float32; weights are exp2(score - maximum).

Tiles begin at multiples of BLOCK_N in the sequence, never at a row's first visible key, so a
query's keys are grouped alike whatever chunk or batch it comes in; and a tile that holds no visible
key of a query leaves its sums as they are, to the bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

# exp(x) = exp2(x * log2(e)): scores are kept in units of log2, where exp2 is one instruction.
LOG2E = tl.constexpr(1.4426950408889634)
NEVER = tl.constexpr(float("-inf"))


@triton.jit
def attend_tiles(
    sums,
    queries,
    keys,
    slope,
    soft_cap,
    window,
    first,
    last,
    SHAPE: tl.constexpr,  # D, D_PAD, PAGE, BLOCK_N, PRECISION
    MASKED: tl.constexpr,
):
    """Tiles [first, last) added to the sums."""
    PAGE: tl.constexpr = SHAPE[2]
    BLOCK_N: tl.constexpr = SHAPE[3]
    acc, top, total = sums
    q, last_key, scale = queries
    k_cache, v_cache, table_ptr, seen = keys
    # Block ids are read a tile ahead. Then K and V wait for no load of their own iteration, and
    # the compiler gives each stage of its pipeline a buffer.
    pages = _pages(table_ptr, first, seen[1], PAGE, BLOCK_N)
    for tile in tl.range(first, last):
        k = _load_tile(k_cache, pages, tile, seen, window, SHAPE, MASKED)
        v = _load_tile(v_cache, pages, tile, seen, window, SHAPE, MASKED)
        pages = _pages(table_ptr, tile + 1, seen[1], PAGE, BLOCK_N)
        scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision=SHAPE[4]) * scale
        if soft_cap is not None:
            # tanh(x) = 1 - 2 / (exp(2 x) + 1), right where exp overflows too. x = score / cap.
            power = tl.exp2(scores * (2.0 / soft_cap))
            scores = (soft_cap * LOG2E) * (1.0 - 2.0 / (power + 1.0))
        key = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        if slope is not None:
            scores += slope[:, None] * (key[None, :] - last_key[:, None])
        if MASKED:
            is_seen = key[None, :] <= last_key[:, None]
            if window is not None:
                is_seen &= key[None, :] > last_key[:, None] - window
            scores = tl.where(is_seen, scores, NEVER)
        new_top = tl.maximum(top, tl.max(scores, 1))
        base = finite(new_top)
        weights = tl.exp2(scores - base[:, None])
        fade = tl.exp2(top - base)
        total = total * fade + tl.sum(weights, 1)
        acc = acc * fade[:, None]
        acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc, input_precision=SHAPE[4])
        top = new_top
    return acc, top, total


@triton.jit
def _pages(table_ptr, tile, num_keys, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The block ids of a tile's keys: one where a block holds whole tiles, else one a key."""
    key = tile * BLOCK_N
    if PAGE % BLOCK_N != 0:
        key += tl.arange(0, BLOCK_N)
    return tl.load(table_ptr + key // PAGE, mask=key < num_keys, other=0)


@triton.jit
def _load_tile(
    cache,
    pages,
    tile,
    seen,
    window,
    SHAPE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """K or V of a tile, [BLOCK_N, D_PAD]. Zero where no query sees a key: past a row's keys and
    before its window lies what others wrote, and a weight of zero times that must be zero."""
    D: tl.constexpr = SHAPE[0]
    D_PAD: tl.constexpr = SHAPE[1]
    PAGE: tl.constexpr = SHAPE[2]
    BLOCK_N: tl.constexpr = SHAPE[3]
    cache_ptr, block_stride, slot_stride = cache
    key = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    dim = tl.arange(0, D_PAD)[None, :]
    # A block's offset in a large cache is past 2**31.
    if PAGE % BLOCK_N == 0:
        cache_ptr += pages.to(tl.int64) * block_stride + (tile * BLOCK_N % PAGE) * slot_stride
        pointers = cache_ptr + tl.arange(0, BLOCK_N)[:, None] * slot_stride + dim
    else:
        slots = pages.to(tl.int64) * block_stride + (key % PAGE) * slot_stride
        pointers = cache_ptr + slots[:, None] + dim
    is_seen = key[:, None] < seen[1]
    if window is not None:
        is_seen &= key[:, None] >= seen[0]
    if MASKED and D < D_PAD:
        return tl.load(pointers, mask=is_seen & (dim < D), other=0.0)
    elif MASKED:
        return tl.load(pointers, mask=is_seen, other=0.0)
    elif D < D_PAD:
        return tl.load(pointers, mask=dim < D, other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def fold(sums, part_sums):
    """The sums over two sets of keys as those over both. Each product is rounded or fused by
    name: chunks fold in `attend`, decoding rows in `combine`, and both must get the same bits."""
    acc, top, total = sums
    part_acc, part_top, part_total = part_sums
    new_top = tl.maximum(top, part_top)
    base = finite(new_top)
    fade = tl.exp2(top - base)
    part_fade = tl.exp2(part_top - base)
    total = tl.fma(total, fade, part_total * part_fade)
    wide_fade = tl.broadcast_to(fade[:, None], acc.shape)
    acc = tl.fma(acc, wide_fade, part_acc * part_fade[:, None])
    return acc, new_top, total


@triton.jit
def finite(top):
    """The maximum to subtract. A query that has seen no key has none; 0 makes its weights 0."""
    return tl.where(top == NEVER, 0.0, top)


@triton.jit
def nothing(BLOCK_M: tl.constexpr, D_PAD: tl.constexpr):
    """The sums over no keys."""
    acc = tl.zeros([BLOCK_M, D_PAD], tl.float32)
    return acc, tl.full([BLOCK_M], NEVER, tl.float32), tl.zeros([BLOCK_M], tl.float32)
