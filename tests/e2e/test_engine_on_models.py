"""The engine's own scheduling on real models: whatever happens to a request, transformers' tokens.

No HTTP and no thread here: engine, scheduler, block pool and model runner, stepped by the test.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from cb_backend.config import EngineConfig
from cb_backend.core.request import FinishReason, Request
from cb_backend.engine.controls import resize_kv_pool
from cb_backend.engine.engine import Engine
from cb_backend.engine.saved_cache import restore_cache, save_cache
from cb_backend.runtime.model_runner import load_model_runner
from tests.fakes import make_request
from tests.models import FALLBACK, NATIVE, TinyModel
from tests.runtime.driving import expected_tokens, prompt_of

NAMES = ("llama", "mistral-window", "qwen2", "qwen3", "gemma3", "gpt_neox")
MODELS = [tiny for tiny in NATIVE + FALLBACK if str(tiny) in NAMES]
BLOCK_SIZE = 4
NUM_TOKENS = 16
PROMPTS = [prompt_of(length, seed=length) for length in (1, 3, 4, 9, 12, 23)]


@dataclass(frozen=True)
class Case:
    folder: Path
    expected: list[list[int]]  # of PROMPTS

    def engine(self, **settings: object) -> Engine:
        config = EngineConfig(model=str(self.folder), dtype="float32", check_invariants=True)
        config = dataclasses.replace(
            config,
            **{"block_size": BLOCK_SIZE, "num_kv_blocks": 80, **settings},  # type: ignore[arg-type]
        )
        ticks = itertools.count()
        return Engine(config, load_model_runner(config), clock=lambda: float(next(ticks)))


@pytest.fixture(params=MODELS, ids=str, scope="module")
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return _build(request.param, tmp_path_factory.mktemp("model"))


@pytest.fixture(params=["mistral-window", "starcoder2"], scope="module")
def windowed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    tiny = next(tiny for tiny in (*NATIVE, *FALLBACK) if str(tiny) == request.param)
    return _build(tiny, tmp_path_factory.mktemp("windowed"))


def _build(tiny: TinyModel, folder: Path) -> Case:
    model = tiny.build()
    model.save_pretrained(folder)
    return Case(folder, [expected_tokens(model, prompt, NUM_TOKENS) for prompt in PROMPTS])


def requests(prompts: Sequence[Sequence[int]] = PROMPTS) -> Iterator[Request]:
    for number, prompt in enumerate(prompts):
        yield make_request(str(number), prompt, max_tokens=NUM_TOKENS)


def run(engine: Engine, *wanted: Request) -> list[list[int]]:
    """The output of each request, in the order given."""
    outputs: dict[str, list[int]] = {request.request_id: [] for request in wanted}
    for request in wanted:
        assert engine.add(request) == []
    while engine.has_work:
        for event in engine.step():
            outputs[event.request_id].extend(event.token_ids)
            assert event.finish_reason is not FinishReason.ERROR, event
    return list(outputs.values())


def test_the_models_asked_for_are_all_there() -> None:
    assert sorted(map(str, MODELS)) == sorted(NAMES)


def test_alone_and_together_at_any_budget(case: Case) -> None:
    alone = case.engine(enable_prefix_caching=False)
    assert [run(alone, request)[0] for request in requests()] == case.expected
    for budget in (7, 16, 512):
        settings = {"max_num_seqs": 6, "max_num_batched_tokens": budget}
        assert run(case.engine(**settings), *requests()) == case.expected


def test_with_the_prefix_cache_cold_and_warm(case: Case) -> None:
    engine = case.engine()
    assert run(engine, *requests()) == case.expected
    cold = engine.stats().cached_tokens
    assert run(engine, *requests()) == case.expected
    assert engine.stats().cached_tokens >= cold + 8 + 8 + 20


@pytest.mark.parametrize("num_host_kv_blocks", [0, 40])
def test_after_preemption_with_and_without_a_host_tier(case: Case, num_host_kv_blocks: int) -> None:
    engine = case.engine(num_kv_blocks=10, num_host_kv_blocks=num_host_kv_blocks)
    assert run(engine, *requests()) == case.expected
    assert engine.stats().preemptions > 0


def test_choices_that_share_a_prompt(case: Case) -> None:
    engine = case.engine(num_kv_blocks=40)
    prompt = PROMPTS[4]
    first = make_request("c0", prompt, max_tokens=NUM_TOKENS)
    forks = [make_request(f"c{n}", prompt, max_tokens=NUM_TOKENS, fork_of="c0") for n in (1, 2)]
    assert run(engine, first, *forks) == [case.expected[4]] * 3
    prompts_computed = engine.stats().computed_tokens - 3 * (NUM_TOKENS - 1)
    assert prompts_computed == len(prompt) + 2, "and the last token once more for each fork"


def test_while_the_pool_shrinks_and_grows(case: Case) -> None:
    engine = case.engine(num_kv_blocks=60, max_model_len=48, num_host_kv_blocks=8)
    outputs: dict[str, list[int]] = {str(number): [] for number in range(len(PROMPTS))}
    for request in requests():
        engine.add(request)
    sizes = itertools.cycle([12, 60, 13, 30])
    for step in itertools.count():
        if not engine.has_work:
            break
        if step % 4 == 3:
            resize_kv_pool(engine, next(sizes))
        for event in engine.step():
            outputs[event.request_id].extend(event.token_ids)
    assert list(outputs.values()) == case.expected
    assert engine.stats().preemptions > 0


def test_blocks_outside_the_window_are_given_up_and_nobody_notices(windowed: Case) -> None:
    engine = windowed.engine(num_kv_blocks=20, max_model_len=40)
    assert engine.executor.model_info.window in (7, 9)
    assert run(engine, *requests()) == windowed.expected
    whole = sum(-(-(len(prompt) + NUM_TOKENS - 1) // BLOCK_SIZE) for prompt in PROMPTS)
    assert whole > 20, "all six at once fit only because of the window"
    assert engine.stats().preemptions == 0


def test_prefixes_kept_in_a_file_serve_the_next_engine(case: Case, tmp_path: Path) -> None:
    settings = {"cache_file": str(tmp_path / "kept")}
    first = case.engine(**settings)
    assert run(first, *requests()) == case.expected
    save_cache(first)
    second = case.engine(**settings)
    restore_cache(second)
    assert run(second, *requests()) == case.expected
    assert second.stats().cached_tokens >= 8 + 8 + 20
