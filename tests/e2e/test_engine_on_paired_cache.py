"""Paired KV blocks (bfloat16 on the CPU) through all that moves blocks about: the same tokens.

The oracle is the same engine on a plain cache, one request at a time; the logits of both are held
to transformers elsewhere.
"""

from __future__ import annotations

import itertools
import weakref
from pathlib import Path

import pytest
import torch
from cb_kernels import can_pair

from cb_backend.config import EngineConfig
from cb_backend.engine.controls import resize_kv_pool
from cb_backend.engine.engine import Engine
from cb_backend.engine.saved_cache import restore_cache, save_cache
from cb_backend.runtime.model_runner import ModelRunner, load_model_runner
from tests.fakes import make_request
from tests.models import TinyModel
from tests.runtime.driving import prompt_of

BLOCK_SIZE = 16
NUM_TOKENS = 20
PROMPTS = [prompt_of(length, seed=length) for length in (1, 15, 16, 17, 40, 63)]
MODELS = [
    TinyModel("llama", "llama", {"head_dim": 16}),
    TinyModel("in-one-call", "llama", {"head_dim": 32, "intermediate_size": 96}),
    TinyModel("mistral-window", "mistral", {"head_dim": 16, "sliding_window": 19}),
]


def start(folder: Path, *, paired: bool = True, **settings: object) -> Engine:
    # Blocks of 24 are no multiple of 16, so they are plain.
    values = {"num_kv_blocks": 60, "block_size": BLOCK_SIZE if paired else 24, **settings}
    config = EngineConfig(
        model=str(folder),
        dtype="bfloat16",
        check_invariants=True,
        **values,  # type: ignore[arg-type]
    )
    ticks = itertools.count()
    engine = Engine(config, load_model_runner(config), clock=lambda: float(next(ticks)))
    assert isinstance(engine.executor, ModelRunner)
    assert engine.executor._cache.is_paired == paired
    return engine


def run(engine: Engine, prompts: list[list[int]], sizes: tuple[int, ...] = ()) -> list[list[int]]:
    """The output of each prompt; every fourth step the pool takes the next of these sizes."""
    outputs: dict[str, list[int]] = {str(number): [] for number in range(len(prompts))}
    for number, prompt in enumerate(prompts):
        engine.add(make_request(str(number), prompt, max_tokens=NUM_TOKENS))
    changes = itertools.cycle(sizes)
    for step in itertools.count():
        if not engine.has_work:
            return list(outputs.values())
        if sizes and step % 4 == 3:
            resize_kv_pool(engine, next(changes))
        for event in engine.step():
            outputs[event.request_id].extend(event.token_ids)
    raise AssertionError


@pytest.fixture(params=MODELS, ids=str, scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not can_pair(torch.bfloat16, block_size=BLOCK_SIZE, head_dim=16, group=3):
        pytest.skip("no products of bfloat16 pairs on this machine")
    folder = tmp_path_factory.mktemp("model")
    request.param.build().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    engine = start(folder, paired=False)
    return [run(engine, [prompt])[0] for prompt in PROMPTS]


def test_alone_together_and_from_the_cache(folder: Path, expected: list[list[int]]) -> None:
    engine = start(folder, num_kv_blocks=60)
    assert [run(engine, [prompt])[0] for prompt in PROMPTS] == expected
    assert run(start(folder, max_num_seqs=6, max_num_batched_tokens=16), PROMPTS) == expected
    assert run(engine, PROMPTS) == expected
    assert engine.stats().cached_tokens > 0


@pytest.mark.parametrize("num_host_kv_blocks", [0, 20])
def test_after_preemption(folder: Path, expected: list[list[int]], num_host_kv_blocks: int) -> None:
    engine = start(folder, num_kv_blocks=7, max_model_len=96, num_host_kv_blocks=num_host_kv_blocks)
    assert run(engine, PROMPTS) == expected
    assert engine.stats().preemptions > 0


def test_while_the_pool_shrinks_and_grows(folder: Path, expected: list[list[int]]) -> None:
    engine = start(folder, num_kv_blocks=40, max_model_len=96, num_host_kv_blocks=6)
    assert run(engine, PROMPTS, sizes=(8, 40, 9)) == expected


def test_a_resized_pool_does_not_keep_the_old_one(folder: Path) -> None:
    engine = start(folder)
    run(engine, PROMPTS[:1])
    assert isinstance(engine.executor, ModelRunner)
    old = [weakref.ref(view) for layer in engine.executor._cache.layers for view in layer]
    resize_kv_pool(engine, 20)
    assert not any(view() is not None for view in old)


def test_choices_that_share_a_prompt(folder: Path, expected: list[list[int]]) -> None:
    engine = start(folder)
    engine.add(make_request("c0", PROMPTS[4], max_tokens=NUM_TOKENS))
    for n in (1, 2):
        engine.add(make_request(f"c{n}", PROMPTS[4], max_tokens=NUM_TOKENS, fork_of="c0"))
    outputs: dict[str, list[int]] = {f"c{n}": [] for n in range(3)}
    while engine.has_work:
        for event in engine.step():
            outputs[event.request_id].extend(event.token_ids)
    assert list(outputs.values()) == [expected[4]] * 3


def test_from_a_file_that_another_engine_wrote(
    folder: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    first = start(folder, cache_file=str(tmp_path / "kept"))
    run(first, PROMPTS)
    save_cache(first)
    second = start(folder, cache_file=str(tmp_path / "kept"))
    restore_cache(second)
    assert run(second, PROMPTS) == expected
    assert second.stats().cached_tokens > 0
    plain = start(folder, paired=False, cache_file=str(tmp_path / "kept"))
    restore_cache(plain)
    assert plain.scheduler.blocks.prefix_cache.indexed_blocks == {}
