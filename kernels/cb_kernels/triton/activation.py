"""The gated activations: act(gate) * up, where gate and up lie side by side."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cb_kernels.triton.launch import chip, launch
from cb_kernels.triton.table import options


def gated(gate_up: Tensor, activation: str) -> Tensor:
    """See `ops.silu_and_mul` and `ops.gelu_and_mul`; `activation`: silu, gelu or gelu_tanh."""
    rows = gate_up.reshape(-1, gate_up.shape[-1])
    width = rows.shape[1] // 2
    out = torch.empty((*gate_up.shape[:-1], width), dtype=gate_up.dtype, device=gate_up.device)
    config = options("gated", "narrow" if width <= 1024 else "wide", chip(gate_up))
    launch(
        _gated,
        (rows.shape[0], triton.cdiv(width, config["BLOCK"])),
        *(rows, out, rows.stride(0)),
        WIDTH=width,
        ACTIVATION=activation,
        **config,
    )
    return out


@triton.jit
def _gated(
    gate_up_ptr,  # [T, 2 * WIDTH]
    out_ptr,  # [T, WIDTH]
    token_stride,
    WIDTH: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    gate_start = gate_up_ptr + token * token_stride
    gate = tl.load(gate_start + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_start + WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION == "silu":
        y = gate * tl.sigmoid(gate)
    elif ACTIVATION == "gelu":
        y = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:
        # 0.5 * (1 + tanh(z)) is sigmoid(2 z), and z = sqrt(2 / pi) * (gate + 0.044715 gate^3).
        y = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    out = (y * up).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * WIDTH + column, out, mask=inside)
