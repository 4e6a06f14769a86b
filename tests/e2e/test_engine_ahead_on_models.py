"""With a step always in flight, a real model says token for token what it says step by step.

The model runner is the one that serves, told to run ahead on the CPU: it takes sampled ids from
where it left them, and its results come a step late.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from cb_backend.config import EngineConfig
from cb_backend.core.request import FinishReason, Request
from cb_backend.core.sampling_params import SamplingParams
from cb_backend.core.step_io import ModelInfo
from cb_backend.engine.controls import resize_kv_pool
from cb_backend.engine.engine import Engine
from cb_backend.runtime import model_runner
from cb_backend.runtime.model_runner import ModelRunner, load_model_runner
from cb_backend.runtime.models.interface import CausalModel
from cb_backend.runtime.sampled_ids import SampledIds
from cb_backend.runtime.staging import StagedStep
from tests.fakes import make_request
from tests.models import FALLBACK, NATIVE, TinyModel
from tests.runtime.driving import GREEDY, prompt_of

NAMES = ("llama", "mistral-window", "gpt_neox")
MODELS = [tiny for tiny in NATIVE + FALLBACK if str(tiny) in NAMES]
PROMPTS = [prompt_of(length, seed=length) for length in (1, 3, 4, 9, 12, 23)]
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, top_k=50)
PENALIZED = SamplingParams(
    temperature=0.9, presence_penalty=0.5, frequency_penalty=0.5, repetition_penalty=1.2
)
Outputs = dict[str, list[int]]


class AheadRunner(ModelRunner):
    """On a CPU and a model without workers, where there is nothing to gain by it, and with the ids
    kept as on a GPU."""

    def __init__(
        self, model: CausalModel, info: ModelInfo, config: EngineConfig, device: torch.device
    ) -> None:
        super().__init__(model, info, config, device)
        self._sampled = SampledIds(config.max_num_seqs, device)

    @property
    def model_info(self) -> ModelInfo:
        return dataclasses.replace(super().model_info, runs_ahead=True)


@pytest.fixture(params=MODELS, ids=str, scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    tiny: TinyModel = request.param
    return tiny.save(tmp_path_factory.mktemp("model"))


def engine_of(folder: Path, **settings: object) -> Engine:
    values = {"block_size": 4, "num_kv_blocks": 80, "max_model_len": 64} | settings
    config = EngineConfig(model=str(folder), dtype="float32", device="cpu", check_invariants=True)
    config = dataclasses.replace(config, **values)  # type: ignore[arg-type]
    ticks = itertools.count()
    return Engine(config, load_model_runner(config), clock=lambda: float(next(ticks)))


def requests(*, more_tokens: int = 0) -> Iterator[Request]:
    """Greedy, sampled and penalized in turn, of different lengths; the last is another choice of
    one prompt."""
    for number, prompt in enumerate([*PROMPTS, PROMPTS[4]]):
        request = make_request(
            str(number),
            prompt,
            max_tokens=7 + 3 * (number % 3) + more_tokens,
            fork_of="4" if number == len(PROMPTS) else None,
        )
        request.params = (GREEDY, SAMPLED, PENALIZED)[number % 3]
        request.seed = 100 + number
        yield request


def run(
    engine: Engine,
    *,
    stops: Outputs | None = None,
    abort_at: int | None = None,
    more_tokens: int = 0,
) -> Outputs:
    """`stops` gives each request one of its own tokens to stop at."""
    outputs: Outputs = {}
    for request in requests(more_tokens=more_tokens):
        if stops is not None:
            request.stop_token_ids = frozenset([stops[request.request_id][4]])
        outputs[request.request_id] = []
        assert engine.add(request) == []
    for step in itertools.count():
        if not engine.has_work:
            break
        engine.help()
        if step == abort_at:
            engine.abort("3")
        for event in engine.step():
            outputs[event.request_id].extend(event.token_ids)
            assert event.finish_reason is not FinishReason.ERROR
    assert engine.scheduler.blocks.pool.num_in_use == 0
    return outputs


def both(
    folder: Path, monkeypatch: pytest.MonkeyPatch, **settings: object
) -> tuple[Engine, Engine]:
    """An engine that takes one step after the other, and one that runs ahead."""
    plain = engine_of(folder, **settings)
    monkeypatch.setattr(model_runner, "ModelRunner", AheadRunner)
    late = engine_of(folder, **settings)
    assert (plain._runs_ahead, late._runs_ahead) == (False, True)
    return plain, late


# By which a request's steps are cut, shared and taken up again in different ways.
SCHEDULES: dict[str, dict[str, object]] = {
    "wide": {},
    "in chunks": {"max_num_seqs": 6, "max_num_batched_tokens": 7},
    "without caching": {"enable_prefix_caching": False},
    "preempted": {"num_kv_blocks": 16},
    "swapped": {"num_kv_blocks": 16, "num_host_kv_blocks": 40},
}


@pytest.mark.parametrize("settings", SCHEDULES.values(), ids=SCHEDULES)
def test_outputs_are_the_same(
    settings: dict[str, object], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, late = both(folder, monkeypatch, **settings)
    expected = run(plain)
    assert run(late) == expected
    # The prefix cache is warm now, with what was generated as well.
    assert run(late) == expected
    preempted = late.stats().preemptions > 0
    assert preempted == ("num_kv_blocks" in settings)


def test_stop_tokens_end_it_where_they_do(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, late = both(folder, monkeypatch)
    stops = run(plain)
    expected = run(plain, stops=stops)
    assert all(len(expected[name]) <= 5 for name in expected)
    assert run(late, stops=stops) == expected


@pytest.mark.parametrize("abort_at", [1, 2, 5])
def test_an_abort_in_flight_leaves_the_others_alone(
    abort_at: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, late = both(folder, monkeypatch)
    expected = run(plain)
    outputs = run(late, abort_at=abort_at)
    cut = outputs.pop("3")
    assert cut == expected.pop("3")[: len(cut)]
    assert outputs == expected


def test_the_pool_is_resized_between_two_steps(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, late = both(folder, monkeypatch, num_host_kv_blocks=8)
    expected = run(plain)
    outputs: Outputs = {request.request_id: [] for request in requests()}
    for request in requests():
        late.add(request)
    sizes = itertools.cycle([18, 60, 17, 30])
    for step in itertools.count():
        if not late.has_work:
            break
        events = list(late.step())
        if step % 3 == 2:
            events += late.collect()
            resize_kv_pool(late, next(sizes))
        for event in events:
            outputs[event.request_id].extend(event.token_ids)
    assert outputs == expected
    if late.executor.model_info.window is None:  # else nobody holds much
        assert late.stats().preemptions > 0


def feed_from_the_row_before(self: SampledIds, step: StagedStep) -> None:
    FILL(self, dataclasses.replace(step, sampled_rows=(step.sampled_rows - 1) % len(self._ids)))


def feed_what_the_host_has(self: SampledIds, step: StagedStep) -> None:
    pass


def keep_in_the_order_of_the_step(self: SampledIds, step: StagedStep, token_ids: Tensor) -> None:
    in_order = dataclasses.replace(step, batch_rows=step.batch_rows.sort().values)
    KEEP(self, in_order, token_ids)


FILL, KEEP = SampledIds.fill, SampledIds.keep


@pytest.mark.parametrize(
    ("name", "planted"),
    [
        ("fill", feed_from_the_row_before),
        ("fill", feed_what_the_host_has),
        ("keep", keep_in_the_order_of_the_step),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_planted_bug_of_the_tokens_way_on_the_device_is_noticed(
    name: str, planted: object, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, late = both(folder, monkeypatch)
    expected = run(plain)
    monkeypatch.setattr(SampledIds, name, planted)
    assert run(late) != expected
