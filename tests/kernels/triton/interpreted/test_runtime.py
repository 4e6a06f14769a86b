"""The runtime's own callers of the kernels, as they would run on a GPU."""

from __future__ import annotations

from pathlib import Path

import torch
from cb_kernels import SamplingParameters, sample
from torch import Tensor

from cb_backend.core.step_io import BlockCopy, CopyKind
from cb_backend.runtime.block_copier import BlockCopier
from cb_backend.runtime.kv_cache import KVCache
from cb_backend.runtime.model_runner import ModelRunner
from cb_backend.runtime.models.interface import ModelGeometry
from cb_backend.runtime.streams import HostStreams
from gpu_check.serving import recorded_logits
from tests.models import TinyModel
from tests.runtime.driving import Driver, load_runner, prompt_of


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
    tokens, sound = sample(logits, _parameters([1, 2, -1, 4]))
    assert sound.tolist() == [True, True, True, False]
    assert tokens[0] == 99
    assert set(tokens[1:3].tolist()) <= {97, 98, 99}
    again, _ = sample(logits[:3], _parameters([1, 2, -1]))
    assert again.tolist() == tokens[:3].tolist()


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


def _logits(folder: Path, dtype: str, *, moved: bool) -> tuple[Tensor, Tensor]:
    """Of a prompt, and of the next token; `moved`: between them its blocks are taken away."""
    runner = load_runner(folder, kv_cache_dtype=dtype, num_host_kv_blocks=1, max_model_len=16)
    driver = Driver(runner)
    request = driver.add("a", prompt_of(9))
    with recorded_logits(runner) as logits:
        driver.step()
        if moved:
            _move_away_and_back(runner, request.blocks, folder / "blocks")
        driver.step()
    prompt, token = logits.values()
    return prompt, token


def _move_away_and_back(runner: ModelRunner, blocks: list[int], path: Path) -> None:
    """One over the host, another through a file."""
    first, second, _ = blocks
    moves = ((CopyKind.OUT, first, 0), (CopyKind.FORK, 9, first), (CopyKind.IN, 0, first))
    runner.copy_blocks([BlockCopy(*move) for move in moves])
    runner.save_blocks(str(path), {bytes(32): second})
    runner.copy_blocks([BlockCopy(CopyKind.FORK, 9, second)])
    runner.load_blocks(str(path), [(0, second)])


def test_a_cache_in_float8_holds_a_model(tmp_path: Path) -> None:
    folder = TinyModel("qwen3", "qwen3", {"num_hidden_layers": 1, "head_dim": 16}).save(tmp_path)
    exact, _ = _logits(folder, "auto", moved=False)
    prompt, token = _logits(folder, "fp8", moved=False)
    assert 0 < (prompt - exact).norm() / exact.norm() < 0.1
    again, after = _logits(folder, "fp8", moved=True)
    assert torch.equal(again, prompt)
    assert torch.equal(after, token)
