"""The public operations on rows of activations: argument checks and dispatch, as in `ops`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from cb_kernels.cpu.library import kernels
from cb_kernels.shapes import shape_text
from cb_kernels.triton.launch import uses_triton


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight [W] over the last dimension, in x's dtype, computed in float32.

    Raises ValueError on a weight of another width.
    """
    _check_norm(x, weight)
    if uses_triton(x):
        from cb_kernels.triton import norm

        return norm.rms_norm(x, weight, eps)
    if weight.dtype != x.dtype:
        return rms_norm(x.float(), weight.float(), eps).to(x.dtype)
    c = kernels() if x.device.type == "cpu" else None
    if c is not None and c.takes_norm(x, weight):
        return c.rms_norm(x, weight, eps)
    return F.rms_norm(x, weight.shape, weight, eps)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """The norm of total = x * scale + residual, and total, which is rounded to x's dtype first.

    Raises ValueError on a residual unlike x or a weight of another width.
    """
    _check_norm(x, weight)
    if residual.shape != x.shape or residual.dtype != x.dtype:
        raise ValueError(f"residual {shape_text(residual)} does not fit x {shape_text(x)}")
    if uses_triton(x):
        from cb_kernels.triton import norm

        return norm.add_rms_norm(x, residual, weight, eps, scale)
    total = torch.add(residual, x, alpha=scale)
    return rms_norm(total, weight, eps), total


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up [..., I] of gate_up [..., 2 I]: gate, then up.

    Raises ValueError on an odd width.
    """
    gate, up = _halves(gate_up)
    if uses_triton(gate_up):
        from cb_kernels.triton import activation

        return activation.gated(gate_up, "silu")
    return F.silu(gate).mul_(up)


def gelu_and_mul(gate_up: Tensor, *, tanh: bool) -> Tensor:
    """gelu(gate) * up [..., I] of gate_up [..., 2 I]; `tanh`: its approximation by that.

    Raises ValueError on an odd width.
    """
    gate, up = _halves(gate_up)
    if uses_triton(gate_up):
        from cb_kernels.triton import activation

        return activation.gated(gate_up, "gelu_tanh" if tanh else "gelu")
    return F.gelu(gate, approximate="tanh" if tanh else "none").mul_(up)


def _halves(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    if gate_up.shape[-1] % 2:
        raise ValueError(f"gate and up must be of one width, got {shape_text(gate_up)}")
    gate, up = gate_up.chunk(2, -1)
    return gate, up


def _check_norm(x: Tensor, weight: Tensor) -> None:
    if weight.dim() != 1 or x.shape[-1:] != weight.shape:
        raise ValueError(f"a weight {shape_text(weight)} does not fit x {shape_text(x)}")
