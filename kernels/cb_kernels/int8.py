"""Rounding to 8 bits, and a product of what was rounded in plain torch.

A weight has one scale for each output; x has one for each GROUP inputs of a row, so that a few
large inputs take precision only from their neighbours. The kernel in C rounds to the same numbers.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

GROUP = 64  # inputs that share a scale; mirrored in cpu/linear_int8.c
_LARGEST = 127.0
_SMALLEST = 1e-30  # what is no larger is zero
_ROWS_AT_A_TIME = 4096  # of a weight in float32: no second copy of a large one


def quantize_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [N, K] as int8 [N, K] and the scales of its rows, float32 [N]."""
    values = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scales = torch.empty(weight.shape[0], dtype=torch.float32, device=weight.device)
    for start in range(0, weight.shape[0], _ROWS_AT_A_TIME):
        part = slice(start, start + _ROWS_AT_A_TIME)
        rounded, scales[part] = _rounded(weight[part].float())
        values[part] = rounded.to(torch.int8)
    return values, scales


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [M, K] as whole numbers [M, K / GROUP, GROUP], zeros behind K, and their scales."""
    padded = F.pad(x.float(), (0, -x.shape[1] % GROUP))
    return _rounded(padded.view(x.shape[0], padded.shape[1] // GROUP, GROUP))


def linear_int8(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """x [M, K] times a weight as `quantize_weight` gives it, in float32 [M, N]."""
    values, x_scales = quantize_rows(x)
    rounded = (values * x_scales[..., None]).flatten(1)[:, : x.shape[1]]
    y = F.linear(rounded, weight.float()) * scales
    return y if bias is None else y + bias.float()


def _rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., K] as whole numbers and their scale; NaN for the scale of what is not finite."""
    largest = x.abs().amax(-1)
    scale = torch.where(largest.isfinite(), largest / _LARGEST, torch.nan)
    inverse = torch.full_like(largest, _LARGEST) / largest  # 127 / largest would round twice
    inverse = torch.where(largest > _SMALLEST, inverse, 0.0)
    return (x * inverse[..., None]).round(), scale
