"""The call of the argmax in C."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor


def argmax(library: ctypes.CDLL, x: Tensor) -> tuple[Tensor, Tensor]:
    """Index int64 [R] and value float32 [R] of x [R, V], contiguous, float32 or bfloat16; V > 0."""
    index = torch.empty(x.shape[0], dtype=torch.int64)
    value = torch.empty(x.shape[0], dtype=torch.float32)
    library.cb_argmax(
        *(x.data_ptr(), index.data_ptr(), value.data_ptr()),
        *(*x.shape, x.dtype == torch.bfloat16),
    )
    return index, value
