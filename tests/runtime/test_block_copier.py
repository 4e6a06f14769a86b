"""Blocks arrive whole, in the order of the list, and nothing else changes."""

from __future__ import annotations

import pytest
import torch

from cb_backend.core.step_io import BlockCopy, CopyKind
from cb_backend.runtime.block_copier import BlockCopier
from cb_backend.runtime.kv_cache import KVCache
from cb_backend.runtime.models.interface import ModelGeometry
from cb_backend.runtime.streams import HostStreams

GEOMETRY = ModelGeometry(
    num_layers=3, num_heads=4, num_kv_heads=2, head_dim=5, vocab_size=9, max_context=99
)
FORK, OUT, IN = CopyKind.FORK, CopyKind.OUT, CopyKind.IN


@pytest.fixture
def cache() -> KVCache:
    cache = KVCache(GEOMETRY, 6, 4, dtype=torch.float32, device=torch.device("cpu"))
    cache.pool.copy_(torch.randn_like(cache.pool))
    return cache


def contents(cache: KVCache, block_id: int) -> torch.Tensor:
    """All layers, K and V, of one block: [L, 2, block_size, H_kv, D]."""
    return torch.stack([torch.stack([k[block_id], v[block_id]]) for k, v in cache.layers])


def test_a_fork_copies_every_layer_and_leaves_the_other_blocks_alone(cache: KVCache) -> None:
    before = [contents(cache, block_id).clone() for block_id in range(6)]
    BlockCopier(cache, HostStreams(), 0).run([BlockCopy(FORK, 1, 4), BlockCopy(FORK, 2, 5)])
    for block_id, source in enumerate([0, 1, 2, 3, 1, 2]):
        assert torch.equal(contents(cache, block_id), before[source])


def test_a_block_comes_back_from_the_host_as_it_left(cache: KVCache) -> None:
    copier, before = BlockCopier(cache, HostStreams(), 2), contents(cache, 3).clone()
    copier.run([BlockCopy(OUT, 3, 1)])
    cache.clear([3])
    copier.run([BlockCopy(IN, 1, 0)])
    assert torch.equal(contents(cache, 0), before)


def test_copies_run_one_after_the_other(cache: KVCache) -> None:
    """A host block is read, then overwritten, then read again: each time what it then held."""
    copier = BlockCopier(cache, HostStreams(), 1)
    a, b = contents(cache, 0).clone(), contents(cache, 1).clone()
    copier.run([BlockCopy(OUT, 0, 0)])
    copier.run([BlockCopy(IN, 0, 4), BlockCopy(OUT, 1, 0), BlockCopy(IN, 0, 5)])
    assert torch.equal(contents(cache, 4), a)
    assert torch.equal(contents(cache, 5), b)


def test_a_fork_of_a_fork_has_the_first_ones_contents(cache: KVCache) -> None:
    copier, first = BlockCopier(cache, HostStreams(), 0), contents(cache, 0).clone()
    copier.run([BlockCopy(FORK, 0, 1), BlockCopy(FORK, 1, 2), BlockCopy(FORK, 2, 3)])
    for block_id in (1, 2, 3):
        assert torch.equal(contents(cache, block_id), first)


def test_of_two_copies_to_one_place_the_later_one_counts(cache: KVCache) -> None:
    copier, b = BlockCopier(cache, HostStreams(), 1), contents(cache, 1).clone()
    copier.run([BlockCopy(OUT, 0, 0), BlockCopy(OUT, 1, 0)])
    copier.run([BlockCopy(IN, 0, 4)])
    assert torch.equal(contents(cache, 4), b)
