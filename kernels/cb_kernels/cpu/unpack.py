"""Out of a packed weight: see packed.h."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor


def unpack_outputs(library: ctypes.CDLL, packed: Tensor, outputs: Tensor, depth: int) -> Tensor:
    """Rows [T, K] of an ungated weight, as they were; all `outputs` are there."""
    outputs = outputs.long().contiguous()
    found = torch.empty(len(outputs), depth, dtype=torch.bfloat16)
    library.cb_unpack_outputs(
        *(packed.data_ptr(), outputs.data_ptr(), len(outputs), depth, found.data_ptr())
    )
    return found
