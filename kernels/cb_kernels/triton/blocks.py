"""Copies of whole KV blocks of all layers: within the pool, and to or from a staging buffer."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from cb_kernels.triton.launch import chip, launch
from cb_kernels.triton.table import options


def copy_blocks(pool: Tensor, block_dim: int, sources: Tensor, targets: Tensor) -> None:
    """See `blocks.copy_blocks`."""
    _launch(pool, pool, block_dim, sources, targets)


def gather_blocks(pool: Tensor, block_dim: int, block_ids: Tensor) -> Tensor:
    """See `blocks.gather_blocks`."""
    shape = (*pool.shape[:block_dim], block_ids.shape[0], *pool.shape[block_dim + 1 :])
    staging = torch.empty(shape, dtype=pool.dtype, device=pool.device)
    _launch(pool, staging, block_dim, block_ids, None)
    return staging


def scatter_blocks(pool: Tensor, block_dim: int, block_ids: Tensor, staging: Tensor) -> None:
    """See `blocks.scatter_blocks`."""
    _launch(staging, pool, block_dim, None, block_ids)


def _launch(
    source: Tensor,
    target: Tensor,
    block_dim: int,
    source_ids: Tensor | None,
    target_ids: Tensor | None,
) -> None:
    """Block source_ids[i] of `source` to target_ids[i] of `target`; None: block i."""
    ids = source_ids if source_ids is not None else target_ids
    assert ids is not None
    layers = math.prod(source.shape[:block_dim])
    width = math.prod(source.shape[block_dim + 1 :])
    if source.element_size() == 1:  # not every chip has float8, but all have bytes
        source, target = source.view(torch.uint8), target.view(torch.uint8)
    config = options("copy_blocks", "any", chip(source))
    launch(
        _copy_blocks,
        (ids.shape[0], layers, triton.cdiv(width, config["BLOCK"])),
        *(source, target, source_ids, target_ids),
        *(source.shape[block_dim] * width, target.shape[block_dim] * width),
        WIDTH=width,
        **config,
    )


@triton.jit
def _copy_blocks(
    source_ptr,  # [layers, N, WIDTH], contiguous
    target_ptr,
    source_ids_ptr,  # [blocks], or None
    target_ids_ptr,
    source_layer_stride,
    target_layer_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(1).to(tl.int64)
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    source, target = index, index
    if source_ids_ptr is not None:
        source = tl.load(source_ids_ptr + index).to(tl.int64)
    if target_ids_ptr is not None:
        target = tl.load(target_ids_ptr + index).to(tl.int64)
    source_at = source_ptr + layer * source_layer_stride + source * WIDTH
    target_at = target_ptr + layer * target_layer_stride + target * WIDTH
    values = tl.load(source_at + column, mask=column < WIDTH)
    tl.store(target_at + column, values, mask=column < WIDTH)
