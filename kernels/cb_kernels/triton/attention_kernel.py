"""Ragged paged attention: one kernel for chunks, decoding rows and shared prefixes.

A program owns BLOCK_M rows of a matrix product: BLOCK_M // GROUP query tokens of one sequence,
times the GROUP query heads that share a KV head. It walks that sequence's keys in tiles of BLOCK_N
and keeps a running softmax (Milakov and Gimelshein 2018, arXiv 1805.02867; FlashAttention-2, Dao
2023, arXiv 2307.08691) over blocks that a table names (PagedAttention, Kwon et al. 2023, arXiv
2309.06180). The keys may be cut into parts, one program each (Flash-Decoding, Dao et al. 2023),
which `combine` folds together.
"""

from __future__ import annotations

import triton
import triton.language as tl

from cb_kernels.triton.attention_tiles import LOG2E, NEVER, attend_tiles, fold, nothing


@triton.jit(
    do_not_specialize=["num_rows", "first_part", "num_parts", "min_tiles", "table_stride"],
    # Rows may begin within a batch's, and numbers are read one by one anyway.
    do_not_specialize_on_alignment=["query_start_loc_ptr", "seq_lens_ptr", "table_ptr"],
)
def _attend(
    q_ptr,  # [T, H_q, D], any strides but the last
    k_ptr,  # [N, PAGE, H_kv, D], any strides but the last
    v_ptr,  # the same
    out_ptr,  # like q; written if num_parts is 1
    part_ptr,  # [T, H_q, num_parts, D] float32; written otherwise: values, not yet divided by
    stat_ptr,  # [T, H_q, num_parts, 2] float32: maximum (log2) and sum of the weights
    query_start_loc_ptr,  # [S + 1] int32
    seq_lens_ptr,  # [S] int32
    table_ptr,  # [S, B] int32
    token_ptr,  # [T] int32, or None: where in q the rows' queries are
    first_key_ptr,  # [S] int32, or None: multiples of BLOCK_N, keys before are left out
    sinks_ptr,  # [H_q], or None
    slopes_ptr,  # [H_q] float32, or None: ALiBi
    k_scale_ptr,  # [H_kv] float32, or None
    v_scale_ptr,  # [H_kv] float32, or None
    scale,  # times log2(e)
    soft_cap,  # or None
    window,  # or None
    num_rows,  # S
    first_part,  # where this launch's parts begin
    num_parts,
    min_tiles,  # that a part has at least, but for the last
    q_token_stride,
    q_head_stride,
    out_token_stride,
    out_head_stride,
    table_stride,
    k_block_stride,
    k_slot_stride,
    k_head_stride,
    v_block_stride,
    v_slot_stride,
    v_head_stride,
    NUM_HEADS: tl.constexpr,  # H_q
    GROUP: tl.constexpr,  # H_q / H_kv
    D: tl.constexpr,
    D_PAD: tl.constexpr,  # the power of two that holds D
    PAGE: tl.constexpr,  # tokens of a block
    PRECISION: tl.constexpr,
    CAUSAL: tl.constexpr,  # else every query sees every key
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PHASES: tl.constexpr,  # whether tiles that all queries see take a loop without masks
    PART_TILES: tl.constexpr,  # tiles of a part at fixed places; 0: its even share
):
    """Grid (T // (BLOCK_M // GROUP) + S, H_kv, parts): more query blocks than there are, so that
    the host need not know the rows; those too many end at once."""
    block_q: tl.constexpr = BLOCK_M // GROUP
    # Last first: a chunk's later blocks see more keys, and the longest work should start first.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    row = _row_of(block, query_start_loc_ptr, num_rows, block_q)
    start = tl.load(query_start_loc_ptr + row)
    num_queries = tl.load(query_start_loc_ptr + row + 1) - start
    first_query = (block - start // block_q - row) * block_q
    if first_query >= num_queries:
        return
    lane = tl.arange(0, BLOCK_M)
    dim = tl.arange(0, D_PAD)[None, :]
    query = first_query + lane // GROUP
    head = kv_head * GROUP + lane % GROUP
    is_real = (lane < block_q * GROUP) & (query < num_queries)
    inside = is_real[:, None] & (dim < D)
    token = _token(start + query, token_ptr, is_real)
    q_offset = token[:, None] * q_token_stride + head[:, None] * q_head_stride + dim
    q = tl.load(q_ptr + q_offset, mask=inside, other=0.0)

    limits = _limits(tl.load(seq_lens_ptr + row), num_queries, first_query, block_q, CAUSAL)
    last_key = limits[0] + (query - first_query) * CAUSAL
    tiles = _tiles(limits, window, first_key_ptr, row, BLOCK_N)
    slope = None
    if slopes_ptr is not None:
        slope = tl.load(slopes_ptr + head, mask=is_real, other=0.0) * LOG2E
    if k_scale_ptr is not None:
        scale *= tl.load(k_scale_ptr + kv_head)
    v_scale = None
    if v_scale_ptr is not None:
        v_scale = tl.load(v_scale_ptr + kv_head)
    k_cache = (k_ptr + kv_head.to(tl.int64) * k_head_stride, k_block_stride, k_slot_stride)
    v_cache = (v_ptr + kv_head.to(tl.int64) * v_head_stride, v_block_stride, v_slot_stride)
    table_ptr += row.to(tl.int64) * table_stride
    queries = (q, last_key, scale)
    keys = (k_cache, v_cache, table_ptr, _seen_keys(limits, window))
    sums = nothing(BLOCK_M, D_PAD)
    if sinks_ptr is not None and num_parts == 1:  # else `combine` counts them, once
        sink = tl.load(sinks_ptr + head, mask=is_real, other=0.0).to(tl.float32) * LOG2E
        sums = (sums[0], sink, sums[2] + 1.0)
    SHAPE: tl.constexpr = (D, D_PAD, PAGE, BLOCK_N, PRECISION)
    if PART_TILES > 0:
        parts = (tiles, num_parts)
        sums = _attend_fixed_parts(
            sums, queries, keys, slope, soft_cap, window, v_scale, parts, SHAPE, PART_TILES
        )
    else:
        work = (tiles, limits, min_tiles)
        sums = _attend_share(sums, queries, keys, slope, soft_cap, window, work, SHAPE, PHASES)
    acc, top, total = sums
    if v_scale is not None and PART_TILES == 0:
        acc *= v_scale
    if token_ptr is not None:  # read again: it would have taken registers meanwhile
        token = tl.load(token_ptr + start + query, mask=is_real, other=0, volatile=True)
        token = token.to(tl.int64)
    if num_parts == 1:
        out = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
        offset = token[:, None] * out_token_stride + head[:, None] * out_head_stride
        tl.store(out_ptr + offset + dim, out, mask=inside)
    else:
        part = (token * NUM_HEADS + head) * num_parts + first_part + tl.program_id(2)
        tl.store(stat_ptr + part * 2, top, mask=is_real)
        tl.store(stat_ptr + part * 2 + 1, total, mask=is_real)
        # Of a part without keys nobody reads the values.
        has_keys = inside & (top[:, None] > NEVER)
        tl.store(part_ptr + part[:, None] * D + dim, acc, mask=has_keys)


@triton.jit
def _row_of(block, query_start_loc_ptr, num_rows, block_q: tl.constexpr):
    """The row of a query block, where row r's blocks begin at query_start_loc[r] // block_q + r:
    room for each row's broken last block without a sum over the rows before."""
    left = 0
    right = num_rows
    while left < right:
        middle = (left + right) // 2
        if tl.load(query_start_loc_ptr + middle) // block_q + middle <= block:
            left = middle + 1
        else:
            right = middle
    return left - 1


@triton.jit
def _token(position, token_ptr, is_real):
    """Where in q the rows' queries are that stand at these positions."""
    if token_ptr is not None:
        position = tl.load(token_ptr + position, mask=is_real, other=0)
    return position.to(tl.int64)


@triton.jit
def _limits(num_keys, num_queries, first_query, block_q: tl.constexpr, CAUSAL: tl.constexpr):
    """The last keys that the first and the last query of a block see."""
    near = num_keys - 1
    far = num_keys - 1
    if CAUSAL:
        near = num_keys - num_queries + first_query
        far = tl.minimum(near + block_q, num_keys) - 1
    return near, far


@triton.jit
def _seen_keys(limits, window):
    """The first key that a query of the block sees, and the end of the last."""
    first = 0
    if window is not None:
        first = tl.maximum(limits[0] - window + 1, 0)
    return first, limits[1] + 1


@triton.jit
def _tiles(limits, window, first_key_ptr, row, BLOCK_N: tl.constexpr):
    """The first tile with a key that a query of the block sees, and the end of the last."""
    first = 0
    if window is not None:
        first = tl.maximum(limits[0] - window + 1, 0) // BLOCK_N
    if first_key_ptr is not None:
        first = tl.maximum(first, tl.load(first_key_ptr + row) // BLOCK_N)
    return first, limits[1] // BLOCK_N + 1


@triton.jit
def _attend_share(
    sums,
    queries,
    keys,
    slope,
    soft_cap,
    window,
    work,
    SHAPE: tl.constexpr,
    PHASES: tl.constexpr,
):
    """This program's share of the tiles."""
    BLOCK_N: tl.constexpr = SHAPE[3]
    tiles, limits, min_tiles = work
    near, far = limits
    num_tiles = tl.maximum(tl.cdiv(tiles[1] - tiles[0], tl.num_programs(2)), min_tiles)
    first = tiles[0] + tl.program_id(2) * num_tiles
    last = tl.minimum(first + num_tiles, tiles[1])
    if PHASES:
        # Tiles [seen, unseen) hold no key that a query of the block may not see.
        seen = first
        if window is not None:
            seen = tl.cdiv(tl.maximum(far - window + 1, 0), BLOCK_N)
            seen = tl.minimum(tl.maximum(seen, first), last)
            sums = attend_tiles(
                sums, queries, keys, slope, soft_cap, window, first, seen, SHAPE, True
            )
        unseen = tl.maximum(tl.minimum((near + 1) // BLOCK_N, last), seen)
        sums = attend_tiles(
            sums, queries, keys, slope, soft_cap, window, seen, unseen, SHAPE, False
        )
        first = unseen
    return attend_tiles(sums, queries, keys, slope, soft_cap, window, first, last, SHAPE, True)


@triton.jit
def _attend_fixed_parts(
    sums,
    queries,
    keys,
    slope,
    soft_cap,
    window,
    v_scale,
    parts,
    SHAPE: tl.constexpr,
    PART_TILES: tl.constexpr,
):
    """Parts at fixed places in the sequence: all of them, folded as `combine` would, or one.

    One loop body serves both, and all tiles are masked: the compiler has nowhere to round
    differently.
    """
    tiles, num_parts = parts
    first = tiles[0] // PART_TILES
    last = tl.cdiv(tiles[1], PART_TILES)
    if num_parts > 1:
        first = tl.maximum(first, tl.program_id(2))
        last = tl.minimum(last, tl.program_id(2) + 1)
    for part in range(first, last):
        begin = tl.maximum(tiles[0], part * PART_TILES)
        end = tl.minimum(tiles[1], (part + 1) * PART_TILES)
        acc, top, total = attend_tiles(
            nothing(queries[0].shape[0], SHAPE[1]),
            *(queries, keys, slope, soft_cap, window, begin, end, SHAPE, True),
        )
        if v_scale is not None:  # before the fold, as it must be where `combine` folds
            acc *= v_scale
        sums = fold(sums, (acc, top, total))
    return sums
