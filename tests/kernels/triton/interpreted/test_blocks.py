"""Blocks are copied, gathered and scattered over all layers, bit by bit."""

from __future__ import annotations

import pytest
import torch
from cb_kernels import copy_blocks, gather_blocks, scatter_blocks
from torch import Tensor

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn]


def _pool(block_dim: int, dtype: torch.dtype) -> Tensor:
    """[L, 2, N, block_size, H_kv, D], or with the heads before the blocks. Blocks are odd-sized."""
    shape = (3, 2, 7, 5, 3, 16) if block_dim == 2 else (3, 2, 3, 7, 5, 16)
    return torch.randn(shape).to(dtype)


def _equal(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.float(), b.float())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_dim", [2, 3])
def test_blocks_come_back_from_where_they_were_copied(block_dim: int, dtype: torch.dtype) -> None:
    pool = _pool(block_dim, dtype)
    before = pool.clone()
    order = torch.arange(7)
    copy_blocks(pool, block_dim, torch.tensor([6, 6, 0]), torch.tensor([1, 4, 2]))
    order[[1, 4, 2]] = torch.tensor([6, 6, 0])
    expected = before.float().index_select(block_dim, order)
    assert _equal(pool, expected)

    ids = torch.tensor([5, 0, 4])
    staging = gather_blocks(pool, block_dim, ids)
    assert staging.is_contiguous()
    assert _equal(staging, expected.index_select(block_dim, ids))

    target = _pool(block_dim, dtype)
    expected = target.float().index_copy(block_dim, ids.flip(0), staging.float())
    scatter_blocks(target, block_dim, ids.flip(0), staging)
    assert _equal(target, expected)


def test_a_wide_block_is_copied_in_several_programs() -> None:
    pool = torch.randn(1, 2, 3, 16, 8, 80)
    staging = gather_blocks(pool, 2, torch.tensor([2]))
    assert torch.equal(staging, pool[:, :, 2:])


def test_a_copy_onto_a_source_is_a_race_that_is_found() -> None:
    with pytest.raises(Exception, match="race"):
        copy_blocks(_pool(2, torch.float32), 2, torch.tensor([0, 1]), torch.tensor([1, 2]))


def test_lists_that_do_not_fit_are_refused() -> None:
    pool = _pool(2, torch.float32)
    with pytest.raises(ValueError, match="2 sources for 1 targets"):
        copy_blocks(pool, 2, torch.tensor([0, 1]), torch.tensor([2]))
    with pytest.raises(ValueError, match="staging must be"):
        scatter_blocks(pool, 2, torch.tensor([0, 1]), pool[:, :, :1])
