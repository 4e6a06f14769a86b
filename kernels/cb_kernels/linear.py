"""The public operation of a batch-invariant linear layer. For GPUs: on the CPU the kernel in C sums
each row alone as it is."""

from __future__ import annotations

from torch import Tensor

from cb_kernels.shapes import shape_text
from cb_kernels.triton.launch import uses_triton


def invariant_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., K] W [N, K]^T + bias [N], each row's sums the same to the bit in any number of rows.

    Raises ValueError on shapes, dtypes or devices that do not fit.
    """
    fits = weight.dim() == 2 and x.shape[-1:] == weight.shape[1:] and x.dtype == weight.dtype
    if not fits or not weight.is_contiguous():
        raise ValueError(f"a weight {shape_text(weight)} does not fit x {shape_text(x)}")
    if bias is not None and (bias.shape != weight.shape[:1] or bias.dtype != x.dtype):
        raise ValueError(f"a bias {shape_text(bias)} does not fit a weight {shape_text(weight)}")
    if not uses_triton(x):
        raise ValueError(f"x on {x.device} is not for this kernel")
    from cb_kernels.triton import linear

    return linear.invariant_linear(x, weight, bias)
