"""Steps that are replayed give the tokens of steps that are not, from inputs that never move."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor

from cb_backend.core.step_io import PoolResize
from cb_backend.runtime.cuda_graphs import bucket_sizes
from cb_backend.runtime.model_runner import ModelRunner
from cb_backend.runtime.models.decoder import Decoder
from cb_backend.runtime.staging import StagedStep
from gpu_check.serving import recorded_logits
from tests.models import FALLBACK, NATIVE, TinyModel
from tests.runtime.driving import Driver, Running, load_runner, prompt_of
from tests.runtime.fake_graphs import FakeMaker

PROMPTS = [prompt_of(length, seed=length) for length in (1, 3, 5, 23, 9)]
NUM_TOKENS = 6
MODELS = [tiny for tiny in NATIVE if str(tiny) in ("llama", "gemma2", "qwen3")]


def _runner(folder: Path, maker: FakeMaker, **changes: object) -> ModelRunner:
    runner = load_runner(folder, **changes)
    runner.capture_graphs(maker, max_num_seqs=8)
    return runner


def _serve(runner: ModelRunner) -> list[list[int]]:
    """Requests that come one after the other and leave: batches of 1 to 5, among them chunks."""
    driver = Driver(runner)
    requests: list[Running] = []
    for i, prompt in enumerate(PROMPTS):
        requests.append(driver.add(f"{i}", prompt))
        driver.step(12)
    driver.run(NUM_TOKENS, 12)
    return [request.output[:NUM_TOKENS] for request in requests]


@pytest.mark.parametrize("tiny", MODELS, ids=str)
def test_tokens_are_the_same_with_and_without(tiny: TinyModel, tmp_path: Path) -> None:
    folder, maker = tiny.save(tmp_path), FakeMaker()
    expected = _serve(load_runner(folder))
    assert _serve(_runner(folder, maker)) == expected
    assert maker.num_replays >= NUM_TOKENS
    assert len(maker.results) == 4  # 1, 2, 4, 8


def test_plain_models_in_c_are_replayed_to_the_bit(tmp_path: Path) -> None:
    sizes = {"vocab_size": 208, "hidden_size": 96, "intermediate_size": 96, "head_dim": 32}
    folder = TinyModel("llama", "llama", sizes).save(tmp_path)
    kept = []
    for runner in (
        load_runner(folder, dtype="bfloat16", block_size=16),
        _runner(folder, FakeMaker(), dtype="bfloat16", block_size=16),
    ):
        with recorded_logits(runner) as logits:
            _serve(runner)
        kept.append(logits)
    assert kept[0].keys() == kept[1].keys()
    assert all(torch.equal(row, kept[1][key]) for key, row in kept[0].items())


def test_inputs_and_results_stay_where_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    addresses: dict[int, set[tuple[int, ...]]] = {}
    forward = Decoder.forward

    def watched(self: Decoder, tokens: Tensor, *args: Tensor) -> Tensor:
        addresses.setdefault(len(tokens), set()).add((tokens.data_ptr(), args[0].data_ptr()))
        return forward(self, tokens, *args)  # type: ignore[arg-type]

    maker = FakeMaker()
    runner = _runner(MODELS[0].save(tmp_path), maker)
    before = [result.data_ptr() for result in maker.results]
    monkeypatch.setattr(Decoder, "forward", watched)
    driver = Driver(runner)
    driver.add("alone", PROMPTS[0])
    for _ in range(4):
        driver.step()
    driver.add("beside", PROMPTS[0])
    for _ in range(4):
        driver.step()
    assert {size: len(places) for size, places in addresses.items()} == {1: 1, 2: 1}
    assert len({places.pop() for places in addresses.values()}) == 1  # and are shared
    assert [result.data_ptr() for result in maker.results] == before


def test_padding_writes_nothing(tmp_path: Path) -> None:
    runner = _runner(MODELS[0].save(tmp_path), FakeMaker())
    driver = Driver(runner)
    for i in range(3):  # of a bucket of 4
        driver.add(f"{i}", PROMPTS[1])
    driver.step()
    pool = runner._cache.pool
    unowned = sorted(driver._free)
    with torch.inference_mode():
        pool.index_fill_(3, torch.tensor(unowned), float("nan"))
    before = pool.clone()
    result = driver.step()
    assert not result.failed
    slot = len(PROMPTS[1]) % 4  # of the one token that each request wrote
    owned = [request.blocks[len(PROMPTS[1]) // 4] for request in driver.live]
    changed = (pool != before) & ~(pool.isnan() & before.isnan())
    places = changed.nonzero()[:, [3, 4]].unique(dim=0).tolist()
    assert sorted(places) == sorted([block, slot] for block in owned)


def test_a_captured_step_writes_nothing_of_the_step_before(tmp_path: Path) -> None:
    runner = _runner(MODELS[0].save(tmp_path), FakeMaker())
    driver = Driver(runner)
    driver.add("a", PROMPTS[3])
    driver.step()
    driver.step()
    runner._forward_pass.forget_graphs()
    before = runner._cache.pool.clone()
    graphs = runner._forward_pass._graphs
    assert graphs is not None
    with torch.inference_mode():
        graphs.capture_all()
    assert torch.equal(runner._cache.pool.nan_to_num(7), before.nan_to_num(7))


def test_a_pool_that_moved_is_captured_anew(tmp_path: Path) -> None:
    folder, maker = MODELS[0].save(tmp_path), FakeMaker()
    runner = _runner(folder, maker)
    driver = Driver(runner)
    request = driver.add("a", PROMPTS[3])
    driver.step()
    driver.step()
    num_graphs = len(maker.results)
    runner.resize(PoolResize(120, (), {}))
    driver.run(NUM_TOKENS)
    assert len(maker.results) == num_graphs + 1  # of the size that was wanted
    other = Driver(load_runner(folder))
    expected = other.add("a", PROMPTS[3])
    other.run(NUM_TOKENS)
    assert request.output == expected.output


def test_a_model_that_waits_is_not_captured(tmp_path: Path) -> None:
    experts = next(tiny for tiny in NATIVE if tiny.name == "mixtral")
    for tiny in (experts, FALLBACK[0]):
        maker = FakeMaker()
        _serve(_runner(tiny.save(tmp_path / tiny.name), maker))
        assert maker.results == []


def test_sizes_go_up_to_the_most_requests() -> None:
    assert bucket_sizes(1) == [1]
    assert bucket_sizes(3) == [1, 2, 3]
    assert bucket_sizes(8) == [1, 2, 4, 8]
    assert bucket_sizes(30) == [1, 2, 4, 8, 16, 24, 30]


def test_graphs_are_captured_anew_without_the_blocks_that_a_smaller_pool_has_lost(
    tmp_path: Path,
) -> None:
    maker = FakeMaker()
    runner = _runner(MODELS[0].save(tmp_path), maker)
    driver = Driver(runner)
    driver.add("a", PROMPTS[3])
    driver.step()
    driver.step()
    runner._forward_pass.forget_graphs()
    seen: list[tuple[int, int]] = []
    forward = runner._forward_pass._run

    def watched(step: StagedStep, **options: int) -> Tensor:
        assert step.rows is not None
        seen.append((int(step.rows.block_table.max()), int(step.rows.seq_lens.max())))
        return forward(step, **options)

    runner._forward_pass._run = watched  # type: ignore[method-assign]
    graphs = runner._forward_pass._graphs
    assert graphs is not None
    with torch.inference_mode():
        graphs.capture_all()
    assert set(seen) == {(0, 1)}


def test_a_closed_runner_lets_go_of_its_model_and_cache(tmp_path: Path) -> None:
    runner = _runner(MODELS[0].save(tmp_path), FakeMaker())
    model, cache = weakref.ref(runner._model), weakref.ref(runner._cache)
    gc.disable()  # what only a collection finds may be frozen, and then is never found
    try:
        runner.close()
        assert (model(), cache()) == (None, None)
    finally:
        gc.enable()
