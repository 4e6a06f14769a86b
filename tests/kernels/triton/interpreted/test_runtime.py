"""The runtime's own callers of the kernels, as they would run on a GPU."""

from __future__ import annotations

import torch
from cb_kernels import SamplingParameters

from cb_backend.core.step_io import BlockCopy, CopyKind
from cb_backend.runtime.block_copier import BlockCopier
from cb_backend.runtime.kv_cache import KVCache
from cb_backend.runtime.models.interface import ModelGeometry
from cb_backend.runtime.sampler import UNSOUND, launch_sample
from cb_backend.runtime.streams import HostStreams


def _parameters(seeds: list[int]) -> SamplingParameters:
    count = len(seeds)
    return SamplingParameters(
        temperature=torch.tensor([0.0] + [1.0] * (count - 1)),
        top_k=torch.full((count,), 3),
        top_p=torch.ones(count),
        min_p=torch.zeros(count),
        seeds=torch.tensor(seeds),
        positions=torch.arange(count),
    )


def test_the_sampler_draws_by_the_kernel() -> None:
    logits = torch.arange(100, dtype=torch.float32).repeat(4, 1).bfloat16()
    logits[3, 5] = torch.nan
    tokens = launch_sample(logits, _parameters([1, 2, -1, 4])).tolist()
    assert tokens[0] == 99
    assert tokens[3] == UNSOUND
    assert set(tokens[1:3]) <= {97, 98, 99}
    assert launch_sample(logits[:3], _parameters([1, 2, -1])).tolist() == tokens[:3]


def test_copies_take_blocks_out_and_in_and_within() -> None:
    geometry = ModelGeometry(
        num_layers=2,
        num_heads=2,
        num_kv_heads=3,
        head_dim=16,
        vocab_size=9,
        max_context=99,
        window=None,
    )
    cpu = torch.device("cpu")
    cache = KVCache(geometry, 5, 4, dtype=torch.bfloat16, device=cpu)
    cache.pool.copy_(torch.randn(cache.pool.shape))
    before = cache.pool.clone()
    copier = BlockCopier(cache, HostStreams(), 2)
    kinds = (CopyKind.OUT, CopyKind.FORK, CopyKind.IN)
    moves = ((4, 1), (0, 4), (1, 2))
    copier.run([BlockCopy(kind, *move) for kind, move in zip(kinds, moves, strict=True)])
    order = torch.tensor([0, 1, 4, 3, 0])
    assert torch.equal(cache.pool, before.index_select(cache.block_dim, order))
