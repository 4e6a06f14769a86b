"""In a deterministic engine a token's logits are the same to the bit alone, in any batch, in any
chunks, cached or not; for every kind of model, with and without the kernels in C."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from cb_kernels.cpu import library

from cb_backend.core.sampling_params import SamplingParams
from cb_backend.runtime.model_runner import ModelRunner
from gpu_check.serving import Logits, recorded_logits
from tests.e2e.serving_process import default_model
from tests.models import FALLBACK, TinyModel
from tests.needs import needs_pairs
from tests.runtime.driving import Driver, load_runner, prompt_of
from tests.runtime.logits import differing

PROMPTS = [prompt_of(length, seed=length) for length in (1, 16, 33, 90, 50)]
NUM_TOKENS = 4
SAMPLED = SamplingParams(temperature=0.8, top_p=0.9)

# Wide enough that the CPU's products of one row and of many differ.
_SIZES = {
    "vocab_size": 208,
    "hidden_size": 96,
    "intermediate_size": 2080,
    "num_hidden_layers": 2,
    "head_dim": 32,
}
MODELS = (
    TinyModel("llama", "llama", _SIZES),
    TinyModel("mistral-window", "mistral", _SIZES | {"sliding_window": 21}),
    TinyModel("gemma2", "gemma2", _SIZES | {"query_pre_attn_scalar": 20, "sliding_window": 21}),
    TinyModel("mixtral", "mixtral", _SIZES | {"num_local_experts": 3, "num_experts_per_tok": 2}),
    next(model for model in FALLBACK if model.name == "gpt_neox"),
)


@pytest.fixture(params=[True, False], ids=["C", "no C"])
def with_c(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    if not request.param:
        monkeypatch.setenv(library.SWITCH, "0")
    library.kernels.cache_clear()
    yield request.param
    monkeypatch.undo()
    library.kernels.cache_clear()


@pytest.fixture(scope="module", params=MODELS, ids=str)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    tiny: TinyModel = request.param
    return tiny.save(tmp_path_factory.mktemp(tiny.name))


def _params(number: int) -> SamplingParams:
    return SAMPLED if number % 2 else SamplingParams(temperature=0.0)


def _alone(runner: ModelRunner) -> None:
    for i, prompt in enumerate(PROMPTS):
        driver = Driver(runner)
        driver.add(f"{i}/alone", prompt, _params(i), seed=i)
        driver.run(NUM_TOKENS)


def _together(runner: ModelRunner, order: Sequence[int], budget: int) -> None:
    driver = Driver(runner)
    for i in order:
        driver.add(f"{i}/{budget}", PROMPTS[i], _params(i), seed=i)
    driver.run(NUM_TOKENS, budget)


def _cached(runner: ModelRunner) -> None:
    """The longest prompt again, most of it found in another's blocks, beside a short one."""
    driver = Driver(runner)
    first = driver.add("3/first", PROMPTS[3], _params(3), seed=3)
    driver.run(NUM_TOKENS, 40)
    driver.add("3/again", PROMPTS[3], _params(3), seed=3, shared=first, num_shared=64)
    driver.add("0/beside", PROMPTS[0], _params(0), seed=0)
    driver._free = [b for b in driver._free if b not in first.blocks]
    driver.run(NUM_TOKENS)


def _all_ways(folder: Path, *, deterministic: bool, dtype: str) -> list[Logits]:
    """Alone first."""
    runner = load_runner(
        folder, dtype=dtype, block_size=16, deterministic=deterministic, num_kv_blocks=64
    )
    ways: list[Callable[[], object]] = [
        lambda: _alone(runner),
        lambda: _together(runner, range(len(PROMPTS)), 10**9),
        lambda: _together(runner, (3, 1, 4, 0, 2), 37),
        lambda: _together(runner, (4, 2, 3), 9),
        lambda: _cached(runner),
    ]
    kept = []
    for way in ways:
        with recorded_logits(runner) as logits:
            way()
        kept.append(logits)
    runner.close()
    return kept


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_logits_are_the_same_to_the_bit(folder: Path, dtype: str, with_c: bool) -> None:
    if folder.name.startswith("llama") or with_c == (dtype == "bfloat16"):  # else as slow as sure
        _check_all_ways(folder, dtype)


def _check_all_ways(folder: Path, dtype: str) -> None:
    ways = _all_ways(folder, deterministic=True, dtype=dtype)
    assert [differing(way, ways[0]) for way in ways[1:]] == [[]] * (len(ways) - 1)
    assert [len(way) for way in ways] == [len(PROMPTS) * NUM_TOKENS] * 3 + [12, 8]


def test_without_it_they_differ(tmp_path: Path) -> None:
    ways = _all_ways(MODELS[0].save(tmp_path), deterministic=False, dtype="float32")
    assert any(differing(way, ways[0]) for way in ways[1:])


@needs_pairs
def test_a_plain_model_in_c_keeps_its_batches(tmp_path: Path) -> None:
    folder = MODELS[0].save(tmp_path)
    for dtype, by_token in (("bfloat16", False), ("float32", True)):
        runner = load_runner(folder, dtype=dtype, block_size=16, deterministic=True)
        assert runner._forward_pass._by_token == by_token
        runner.close()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_default_model_is_deterministic(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Fewer and shorter where tokens go through the model one at a time.
    lengths = (5, 40, 20) if dtype == "float32" else (1, 16, 33, 150, 70)
    monkeypatch.setattr(sys.modules[__name__], "PROMPTS", [prompt_of(n, n) for n in lengths])
    runner = load_runner(
        Path(default_model()), dtype=dtype, block_size=16, deterministic=True, num_kv_blocks=64
    )
    with recorded_logits(runner) as alone:
        _alone(runner)
    with recorded_logits(runner) as together:
        _together(runner, range(len(PROMPTS))[::-1], 37)
    runner.close()
    assert len(together) == len(lengths) * NUM_TOKENS
    assert differing(together, alone) == []
