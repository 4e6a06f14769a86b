"""With workers computing one step while the host works on the next, a model says what it says when
each step is over before the next is thought of."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from cb_kernels import DecoderRun
from torch import Tensor

from cb_backend.core.request import FinishReason
from cb_backend.core.step_io import BlockCopy
from cb_backend.engine.controls import resize_kv_pool
from cb_backend.engine.engine import Engine
from cb_backend.runtime.block_copier import BlockCopier
from cb_backend.runtime.sampled_ids import HostSampledIds
from cb_backend.runtime.staging import StagedStep
from tests.e2e.test_engine_ahead_on_models import Outputs, engine_of, requests, run
from tests.fakes import make_request
from tests.models import TinyModel
from tests.needs import needs_pairs
from tests.runtime.driving import prompt_of
from tests.runtime.models.test_plain_decoder import PLAIN

pytestmark = needs_pairs
NAMES = ("llama", "biases", "mistral-window")
SCHEDULES: dict[str, dict[str, object]] = {
    "wide": {},
    "in chunks": {"max_num_seqs": 6, "max_num_batched_tokens": 7},
    "without caching": {"enable_prefix_caching": False},
    "preempted": {"num_kv_blocks": 7},
    "swapped": {"num_kv_blocks": 7, "num_host_kv_blocks": 12},
    "int8": {"quantization": "int8"},
}


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=[tiny for tiny in PLAIN if tiny.name in NAMES], ids=str, scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    tiny: TinyModel = request.param
    return tiny.save(tmp_path_factory.mktemp("model"))


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return PLAIN[0].save(tmp_path)


def load(folder: Path, **settings: object) -> Engine:
    fixed = {"dtype": "bfloat16", "block_size": 16, "max_model_len": 96}
    return engine_of(folder, **(fixed | settings))


def both(folder: Path, **settings: object) -> tuple[Engine, Engine]:
    """An engine that takes one step after the other, and one that runs ahead."""
    plain, ahead = load(folder, **settings), load(folder, **settings)
    assert (plain._runs_ahead, ahead._runs_ahead) == (True, True)
    plain._runs_ahead = False
    return plain, ahead


@pytest.mark.parametrize("settings", SCHEDULES.values(), ids=SCHEDULES)
def test_outputs_are_the_same(settings: dict[str, object], folder: Path) -> None:
    plain, ahead = both(folder, **settings)
    expected = run(plain, more_tokens=40)
    assert run(ahead, more_tokens=40) == expected
    # The prefix cache is warm now, with what was generated as well.
    assert run(ahead, more_tokens=40) == expected
    assert (ahead.stats().preemptions > 0) == ("num_kv_blocks" in settings)


def test_outputs_are_the_same_where_rows_have_the_same_bits(llama: Path) -> None:
    plain, ahead = both(llama, deterministic=True)
    assert run(ahead, more_tokens=40) == run(plain, more_tokens=40)


def test_stop_tokens_end_it_where_they_do(folder: Path) -> None:
    plain, ahead = both(folder)
    stops = run(plain)
    expected = run(plain, stops=stops)
    assert all(len(expected[name]) <= 5 for name in expected)
    assert run(ahead, stops=stops) == expected


@pytest.mark.parametrize("abort_at", [1, 2, 5])
def test_an_abort_in_flight_leaves_the_others_alone(abort_at: int, folder: Path) -> None:
    plain, ahead = both(folder)
    expected = run(plain)
    outputs = run(ahead, abort_at=abort_at)
    cut = outputs.pop("3")
    assert cut == expected.pop("3")[: len(cut)]
    assert outputs == expected


def test_the_pool_is_resized_between_two_steps(llama: Path) -> None:
    plain, ahead = both(llama, num_host_kv_blocks=8)
    expected = run(plain, more_tokens=40)
    outputs: Outputs = {}
    for request in requests(more_tokens=40):
        outputs[request.request_id] = []
        ahead.add(request)
    sizes = itertools.cycle([6, 20, 7, 10])
    for step in itertools.count():
        if not ahead.has_work:
            break
        events = list(ahead.step())
        if step % 3 == 2:
            events += ahead.collect()
            resize_kv_pool(ahead, next(sizes))
        for event in events:
            outputs[event.request_id].extend(event.token_ids)
    assert outputs == expected
    assert ahead.stats().preemptions > 0


def test_on_one_thread_nothing_is_gained_by_it(llama: Path) -> None:
    torch.set_num_threads(1)
    engine = load(llama)
    assert not engine._runs_ahead
    expected = run(engine)
    torch.set_num_threads(2)
    assert run(load(llama)) == expected


def test_who_arrives_while_a_step_is_computed_joins_the_next(llama: Path) -> None:
    engine = load(llama)
    engine.add(make_request("a", prompt_of(9), max_tokens=20))
    engine.step()
    engine.help()
    engine.add(make_request("b", prompt_of(5), max_tokens=4))
    engine.step()
    assert [plan.rows.request_ids for plan in engine.scheduler.plans_in_flight] == [("a", "b")]
    engine.close()


def fail_at(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, number: int) -> None:
    """The call of that number raises."""
    method, numbers = getattr(owner, name), itertools.count(1)

    def failing(*arguments: object) -> object:
        if next(numbers) == number:
            raise RuntimeError("planted")
        return method(*arguments)

    monkeypatch.setattr(owner, name, failing)


@pytest.mark.parametrize(
    ("owner", "name"), [(DecoderRun, "begin"), (DecoderRun, "result"), (HostSampledIds, "keep")]
)
@pytest.mark.parametrize("number", [1, 2, 5])
def test_a_failure_ends_its_requests_and_those_behind_it(
    owner: type, name: str, number: int, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nobody who comes later."""
    engine = load(llama)
    expected = run(engine)
    fail_at(monkeypatch, owner, name, number)
    engine.add(make_request("early", prompt_of(9), max_tokens=20))
    ends = []
    while engine.has_work:
        engine.help()
        ends += [event.finish_reason for event in engine.step() if event.finish_reason]
    assert ends == [FinishReason.ERROR]
    assert run(engine) == expected


def test_a_copy_that_fails_ends_the_step_that_wanted_it(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is made when the step before is over, and that one has its tokens."""
    engine = load(llama)
    copy = BlockCopier.run

    def failing(self: BlockCopier, copies: Sequence[BlockCopy]) -> None:
        if copies:
            raise RuntimeError("planted")
        copy(self, copies)

    monkeypatch.setattr(BlockCopier, "run", failing)
    engine.add(make_request("parent", prompt_of(20), max_tokens=12))
    engine.add(make_request("fork", prompt_of(20), max_tokens=3, fork_of="parent"))
    tokens: list[str] = []
    errors: set[str] = set()
    while engine.has_work:
        for event in engine.step():
            tokens += [event.request_id] * len(event.token_ids)
            if event.finish_reason is FinishReason.ERROR:
                errors.add(event.request_id)
    assert errors == {"parent", "fork"}
    assert tokens
    assert set(tokens) == {"parent"}


def test_a_runner_is_closed_with_a_step_under_way(llama: Path) -> None:
    for _ in range(5):
        engine = load(llama)
        engine.add(make_request("a", prompt_of(40), max_tokens=5))
        engine.step()
        engine.step()
        engine.close()


def test_a_runner_is_closed_with_a_step_that_could_not_begin(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load(llama)
    fail_at(monkeypatch, DecoderRun, "begin", 1)
    engine.add(make_request("a", prompt_of(9), max_tokens=5))
    engine.step()
    engine.close()
    assert not hasattr(engine.executor, "_model")


def feed_from_the_row_before(self: HostSampledIds, step: StagedStep) -> None:
    before = self._ids.copy()
    self._ids[:] = before[[-1, *range(len(before) - 1)]]
    FILL(self, step)
    self._ids[:] = before


def keep_a_step_late(self: HostSampledIds, step: StagedStep, token_ids: Tensor) -> None:
    late = vars(self).get("late")
    if late is not None:
        KEEP(self, *late)
    vars(self)["late"] = step, token_ids


FILL, KEEP = HostSampledIds.fill, HostSampledIds.keep


@pytest.mark.parametrize(
    ("name", "planted"),
    [("fill", feed_from_the_row_before), ("keep", keep_a_step_late)],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_planted_bug_of_the_tokens_way_is_noticed(
    name: str, planted: object, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, ahead = both(llama)
    expected = run(plain)
    monkeypatch.setattr(HostSampledIds, name, planted)
    assert run(ahead) != expected
