"""Copies of whole blocks of a pool [..., N, ...] whose dimension `block_dim` counts the blocks.

The pool is contiguous; ids are int64 [n] on its device and distinct where they are written.
"""

from __future__ import annotations

from torch import Tensor

from cb_kernels.triton.launch import uses_triton


def copy_blocks(pool: Tensor, block_dim: int, sources: Tensor, targets: Tensor) -> None:
    """Overwrite block targets[i] with block sources[i]; no target may be among the sources.

    Raises ValueError on lists of different lengths.
    """
    if sources.shape != targets.shape:
        raise ValueError(f"{sources.shape[0]} sources for {targets.shape[0]} targets")
    if uses_triton(pool):
        from cb_kernels.triton import blocks

        blocks.copy_blocks(pool, block_dim, sources, targets)
    else:
        pool.index_copy_(block_dim, targets, pool.index_select(block_dim, sources))


def gather_blocks(pool: Tensor, block_dim: int, block_ids: Tensor) -> Tensor:
    """The blocks [..., n, ...], contiguous, in their order."""
    if uses_triton(pool):
        from cb_kernels.triton import blocks

        return blocks.gather_blocks(pool, block_dim, block_ids)
    return pool.index_select(block_dim, block_ids)


def scatter_blocks(pool: Tensor, block_dim: int, block_ids: Tensor, staging: Tensor) -> None:
    """The reverse of `gather_blocks`. Raises ValueError on a staging buffer of another shape."""
    expected = list(pool.shape)
    expected[block_dim] = block_ids.shape[0]
    if list(staging.shape) != expected or staging.dtype != pool.dtype:
        raise ValueError(f"staging must be {expected} {pool.dtype}, got {list(staging.shape)}")
    if uses_triton(pool):
        from cb_kernels.triton import blocks

        blocks.scatter_blocks(pool, block_dim, block_ids, staging)
    else:
        pool.index_copy_(block_dim, block_ids, staging)
