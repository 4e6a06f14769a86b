"""Linear layers whose sums do not depend on the batch.

A library picks another kernel, and so another order of the sums, for another number of rows. Here
one program makes a tile of rows and outputs and walks all of K in one order; neither the tiles nor
that order depend on the number of rows, and a row of a tile knows nothing of the others.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cb_kernels.triton.launch import chip, launch
from cb_kernels.triton.table import options


def invariant_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """See `linear.invariant_linear`."""
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    (num_rows, depth), width = rows.shape, weight.shape[0]
    out = torch.empty(num_rows, width, dtype=x.dtype, device=x.device)
    config = options("linear", "float32" if x.dtype == torch.float32 else "half", chip(x))
    tiles = triton.cdiv(num_rows, config["BLOCK_M"]) * triton.cdiv(width, config["BLOCK_N"])
    launch(_linear, (tiles,), rows, weight, bias, out, num_rows, width, depth, **config)
    return out.view(*x.shape[:-1], width)


# One row is compiled like many: what is known of their number must not choose the code.
@triton.jit(do_not_specialize=["num_rows"])
def _linear(
    x_ptr,  # [num_rows, depth]
    weight_ptr,  # [width, depth]
    bias_ptr,  # [width], or None
    out_ptr,  # [num_rows, width]
    num_rows,
    width,
    depth,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # The tiles of rows that share a tile of the weight run side by side: it is read once.
    num_row_tiles = tl.cdiv(num_rows, BLOCK_M)
    tile = tl.program_id(0)
    row = (tile % num_row_tiles).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = (tile // num_row_tiles).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    x_at = x_ptr + row[:, None] * depth + k[None, :]
    weight_at = weight_ptr + column[:, None] * depth + k[None, :]
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, depth, BLOCK_K):
        exists = k[None, :] < depth - start
        x = tl.load(x_at, mask=(row[:, None] < num_rows) & exists, other=0.0)
        weight = tl.load(weight_at, mask=(column[:, None] < width) & exists, other=0.0)
        sums = tl.dot(x, tl.trans(weight), sums, input_precision="ieee")
        x_at += BLOCK_K
        weight_at += BLOCK_K
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + column, mask=column < width, other=0.0)
        sums += bias.to(tl.float32)[None, :]
    out_at = out_ptr + row[:, None] * width + column[None, :]
    inside = (row[:, None] < num_rows) & (column[None, :] < width)
    tl.store(out_at, sums.to(out_ptr.dtype.element_ty), mask=inside)
