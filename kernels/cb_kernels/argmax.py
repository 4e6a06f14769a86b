"""The largest logit of each row, by the kernel in C on a CPU that has it, else by torch."""

from __future__ import annotations

import torch
from torch import Tensor

from cb_kernels.cpu.argmax import argmax as argmax_in_c
from cb_kernels.cpu.library import kernels
from cb_kernels.shapes import shape_text

_LARGEST_BLOCK = 256
_SMALLEST_BLOCK = 16


def argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The first index [R] of each row's largest number of [R, V], and that number in float32.

    A NaN counts as larger than all. Raises ValueError unless there are rows of something.
    """
    if logits.dim() != 2 or logits.shape[1] == 0:
        raise ValueError(f"logits must be [R, V] with V > 0, got {shape_text(logits)}")
    c = kernels() if logits.device.type == "cpu" else None
    if c is not None and logits.dtype in (torch.float32, torch.bfloat16):
        return argmax_in_c(c.library, logits.contiguous())
    return argmax_by_blocks(logits)


def argmax_by_blocks(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The same by torch, which finds maxima by vectors but their indices one number at a time."""
    num_rows, vocab_size = logits.shape
    block = min(vocab_size & -vocab_size, _LARGEST_BLOCK)  # the largest power of two that fits
    if block < _SMALLEST_BLOCK:
        values, index = logits.float().max(-1)
        return index, values
    blocks = logits.reshape(num_rows, vocab_size // block, block)
    values, best_block = blocks.amax(-1).float().max(-1)
    row = torch.arange(num_rows, device=logits.device)
    index = blocks[row, best_block].float().argmax(-1)
    return best_block * block + index, values
