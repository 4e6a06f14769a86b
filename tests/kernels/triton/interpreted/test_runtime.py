"""The runtime's own callers of the kernels, as they would run on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cb_kernels import SamplingParameters, sample
from torch import Tensor

from cb_backend.core.sampling_params import SamplingParams
from cb_backend.core.step_io import BlockCopy, CopyKind
from cb_backend.runtime import model_runner
from cb_backend.runtime.block_copier import BlockCopier
from cb_backend.runtime.kv_cache import KVCache
from cb_backend.runtime.logit_editor import DeviceLogitEditor
from cb_backend.runtime.model_runner import ModelRunner
from cb_backend.runtime.models.interface import ModelGeometry
from cb_backend.runtime.streams import HostStreams
from gpu_check.serving import recorded_logits
from tests.e2e.test_engine_ahead_on_models import AheadRunner, engine_of
from tests.fakes import make_request
from tests.models import TinyModel
from tests.runtime.driving import GREEDY, Driver, load_runner, prompt_of
from tests.runtime.edited import expected_tokens


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


def test_logits_are_edited_by_the_kernel(tmp_path: Path) -> None:
    """Beside a row that asks for nothing, over the end of one request and the start of others."""
    model = TinyModel("llama", "llama", {"num_hidden_layers": 1}).build()
    model.save_pretrained(tmp_path)
    driver = Driver(load_runner(tmp_path, max_num_seqs=3))
    all_params = [
        SamplingParams(temperature=0.0, repetition_penalty=1.2, logit_bias={7: 0.5}, min_tokens=3),
        SamplingParams(temperature=0.0, presence_penalty=1.5, frequency_penalty=0.8),
        SamplingParams(temperature=0.0, logit_bias={7: 3.0, 134: -100.0}),
        GREEDY,
    ]
    for order in (all_params[:3], all_params[1:]):
        prompts = [prompt_of(length, seed=length) for length in (9, 5, 6)]
        requests = [
            driver.add(f"{i}", prompt, params)
            for i, (prompt, params) in enumerate(zip(prompts, order, strict=True))
        ]
        driver.step(12)
        driver.step()
        driver.preempt(requests[0])
        driver.run(4)
        for request, prompt, params in zip(requests, prompts, order, strict=True):
            assert request.output[:4] == expected_tokens(model, prompt, 4, params, (2,))


def test_counts_on_the_device_have_the_token_in_flight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And none of one that was computed in vain behind the end of a row's owner before."""
    model = TinyModel("llama", "llama", {"num_hidden_layers": 1}).build()
    model.save_pretrained(tmp_path)
    monkeypatch.setattr(model_runner, "ModelRunner", AheadRunner)
    engine = engine_of(tmp_path, max_num_seqs=2)
    params = SamplingParams(temperature=0.0, presence_penalty=1.5, repetition_penalty=1.2)
    expected, outputs = {}, {}
    for number in range(4):
        request = make_request(f"{number}", prompt_of(4 + number), max_tokens=6)
        request.params, name = params, request.request_id
        expected[name] = expected_tokens(model, request.token_ids, 6, params)
        if number < 2:
            request.stop_token_ids = frozenset([expected[name][3]])
            expected[name] = expected[name][:4]
        outputs[name] = list[int]()
        engine.add(request)
    while engine.has_work:
        for event in engine.step():
            outputs[event.request_id] += event.token_ids
    assert outputs == expected
    assert isinstance(engine.executor, ModelRunner)
    assert isinstance(engine.executor._editor, DeviceLogitEditor)


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
