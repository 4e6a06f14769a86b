"""The products of a mixture of experts: tiles of tokens, each with its own expert's weights.

An expert's rows are gathered where they are multiplied and go back to the places of their pairs, so
that nothing is moved to sort them, and a token's results lie side by side to be summed in order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cb_kernels.triton.activation import gated
from cb_kernels.triton.launch import chip, launch
from cb_kernels.triton.routing import Tiles, group_pairs
from cb_kernels.triton.table import Options, options

# Of pairs an expert has on average: from these on its tiles are larger.
_MANY, _MOST = 16, 256
# Tiles of pairs that go over the weights side by side.
_TILES = 8


def mix_experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    chosen: Tensor,
    *,
    activation: str,
    invariant: bool,
) -> Tensor:
    """See `experts.mix_experts`."""
    config = _config(x, gate_up.shape[0], chosen.numel(), invariant=invariant)
    tiles = group_pairs(chosen, gate_up.shape[0], config["BLOCK_M"])
    inner = gated(multiply_pairs(x, gate_up, tiles, config), activation)  # [T * top_k, I]
    return sum_pairs(multiply_pairs(inner, down, tiles, config, factors=weights), len(x))


def _config(x: Tensor, num_experts: int, num_pairs: int, *, invariant: bool) -> Options:
    """By shapes alone, as the host knows no more. `invariant`: not by the number of rows either."""
    if x.dtype == torch.float32:
        shape_class = "float32"
    elif invariant:
        shape_class = "fixed"
    elif num_pairs < _MANY * num_experts:
        shape_class = "few"
    else:
        shape_class = "many" if num_pairs < _MOST * num_experts else "most"
    return options("multiply_pairs", shape_class, chip(x))


def multiply_pairs(
    x: Tensor, weight: Tensor, tiles: Tiles, config: Options, *, factors: Tensor | None = None
) -> Tensor:
    """x W^T [pairs, N] of each pair with its expert of weight [E, N, K], times its factor.

    x [rows, K] has a row for each pair, or one for all that follow each other, as a token's do.
    """
    (_, width, depth), num_pairs = weight.shape, tiles.num_pairs
    out = torch.empty(num_pairs, width, dtype=x.dtype, device=x.device)
    num_tiles = len(tiles.experts)
    launch(
        _multiply_pairs,
        (num_tiles * triton.cdiv(width, config["BLOCK_N"]),),
        *(x, weight, tiles.experts, tiles.pairs, factors, out),
        *(num_tiles, num_pairs, width, depth),
        PAIRS_A_ROW=num_pairs // max(1, len(x)),
        TILES=_TILES,
        **config,
    )
    return out


def sum_pairs(y: Tensor, num_tokens: int) -> Tensor:
    """Of each token's pairs in y [pairs, H], in their order. [T, H]"""
    num_pairs, width = y.shape
    out = torch.empty(num_tokens, width, dtype=y.dtype, device=y.device)
    config = options("sum_pairs", "any", chip(y))
    launch(
        _sum_pairs,
        (num_tokens, triton.cdiv(width, config["BLOCK"])),
        *(y, out),
        WIDTH=width,
        TOP_K=num_pairs // max(1, num_tokens),
        **config,
    )
    return out


# One row is compiled like many: what is known of their number must not choose the code.
@triton.jit(do_not_specialize=["num_tiles", "num_pairs"])
def _multiply_pairs(
    x_ptr,  # [num_pairs / PAIRS_A_ROW, depth]
    weight_ptr,  # [experts, width, depth]
    expert_ptr,  # [num_tiles]
    pair_ptr,  # [num_tiles, BLOCK_M]
    factor_ptr,  # [num_pairs], or None
    out_ptr,  # [num_pairs, width]
    num_tiles,
    num_pairs,
    width,
    depth,
    PAIRS_A_ROW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TILES: tl.constexpr,
):
    # Programs that run side by side share tiles of pairs, and those of one expert its weights.
    programs = TILES * tl.cdiv(width, BLOCK_N)
    number = tl.program_id(0)
    first = number // programs * TILES
    beside = tl.minimum(num_tiles - first, TILES)
    tile = first + number % programs % beside
    expert = tl.load(expert_ptr + tile).to(tl.int64)
    if expert < 0:
        return
    pair = tl.load(pair_ptr + tile * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    column = number % programs // beside * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    x_at = x_ptr + (pair // PAIRS_A_ROW)[:, None] * depth + k[None, :]
    weight_at = weight_ptr + (expert * width + column)[:, None] * depth + k[None, :]
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, depth, BLOCK_K):
        exists = k[None, :] < depth - start
        x = tl.load(x_at, mask=(pair[:, None] < num_pairs) & exists, other=0.0)
        weight = tl.load(weight_at, mask=(column[:, None] < width) & exists, other=0.0)
        sums = tl.dot(x, tl.trans(weight), sums, input_precision="ieee")
        x_at += BLOCK_K
        weight_at += BLOCK_K
    if factor_ptr is not None:
        sums *= tl.load(factor_ptr + pair, mask=pair < num_pairs, other=0.0)[:, None]
    out_at = out_ptr + pair[:, None] * width + column[None, :]
    inside = (pair[:, None] < num_pairs) & (column[None, :] < width)
    tl.store(out_at, sums.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _sum_pairs(
    y_ptr,  # [T, TOP_K, WIDTH]
    out_ptr,  # [T, WIDTH]
    WIDTH: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    total = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(TOP_K):
        y_at = y_ptr + (token * TOP_K + i) * WIDTH + column
        total += tl.load(y_at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * WIDTH + column, total.to(out_ptr.dtype.element_ty), mask=inside)
