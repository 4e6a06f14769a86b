"""RMS norm of rows, also with the addition of a residual before it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cb_kernels.triton.launch import chip, launch
from cb_kernels.triton.table import options, width_class


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `ops.rms_norm`."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, None, None, weight, out, eps)
    return out


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, scale: float
) -> tuple[Tensor, Tensor]:
    """See `ops.add_rms_norm`."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, residual, total, weight, out, eps, scale)
    return out, total


def _launch(
    x: Tensor,
    residual: Tensor | None,
    total: Tensor | None,
    weight: Tensor,
    out: Tensor,
    eps: float,
    scale: float = 1.0,
) -> None:
    width = weight.shape[0]
    rows = x if x.dim() == 3 and x.stride(2) == 1 else x.reshape(-1, 1, width)  # [T, H, width]
    num_rows = rows.shape[0] * rows.shape[1]
    config = options("rms_norm", width_class(width), chip(x))
    launch(
        _rms_norm,
        (triton.cdiv(num_rows, config["ROWS"]),),
        *(rows, None if residual is None else residual.contiguous(), weight, out, total),
        *(num_rows, rows.stride(0), rows.stride(1), eps, scale),
        HEADS=rows.shape[1],
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
        **config,
    )


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm(
    x_ptr,  # [T, HEADS, WIDTH], any strides but the last
    residual_ptr,  # [T * HEADS, WIDTH], or None
    weight_ptr,  # [WIDTH]
    out_ptr,  # [T * HEADS, WIDTH]
    total_ptr,  # [T * HEADS, WIDTH], or None: x * scale + residual
    num_rows,  # T * HEADS
    x_token_stride,
    x_head_stride,
    eps,
    scale,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < num_rows) & (column < WIDTH)
    start = row // HEADS * x_token_stride + row % HEADS * x_head_stride
    x = tl.load(x_ptr + start + column, mask=inside, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + row * WIDTH + column, mask=inside, other=0.0)
        total = (x * scale + residual.to(tl.float32)).to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + row * WIDTH + column, total, mask=inside)
        x = total.to(tl.float32)  # what the next layer will add to is what is normed
    rms = tl.sqrt(tl.sum(x * x, axis=1) / WIDTH + eps)
    weight = tl.load(weight_ptr + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    y = x / rms[:, None] * weight
    tl.store(out_ptr + row * WIDTH + column, y.to(out_ptr.dtype.element_ty), mask=inside)
