from __future__ import annotations

import itertools
import threading

import pytest

from cb_backend.config import EngineConfig
from cb_backend.core.request import FinishReason
from cb_backend.core.step_io import StepPlan
from cb_backend.engine.engine import Engine
from cb_backend.errors import InvariantError, WrongThreadError
from tests.fakes import ShadowExecutor, make_model_info, make_request, solo_output


def make_engine(executor: ShadowExecutor | None = None, **settings: object) -> Engine:
    config = EngineConfig(model="fake", check_invariants=True, **settings)  # type: ignore[arg-type]
    ticks = itertools.count()
    return Engine(config, executor or ShadowExecutor(), clock=lambda: float(next(ticks)))


def test_a_target_itl_holds_the_steps_to_it_once_their_speed_is_known() -> None:
    now, took = [0.0], []

    def compute(plan: StepPlan) -> None:
        took.append(0.001 + 0.0001 * plan.num_tokens)
        now[0] += took[-1]

    config = EngineConfig(
        model="fake",
        target_itl_s=0.02,
        max_num_seqs=4,
        max_num_batched_tokens=1000,
        check_invariants=True,
    )
    info = make_model_info(num_blocks=1000, block_size=4)
    executor = ShadowExecutor(info, before_step=compute)
    engine = Engine(config, executor, clock=lambda: now[0])
    engine.add(make_request("stream", range(20), max_tokens=60))
    for _ in range(20):
        engine.step()
    took.clear()
    engine.add(make_request("long", range(100, 900), max_tokens=1))
    while "long" not in {event.request_id for event in engine.step()}:
        pass
    assert len(took) > 3, "in one step the prompt would stop the stream for 80 ms"
    assert max(took) == pytest.approx(0.02, rel=0.02)


def test_a_step_brings_the_tokens_of_all_its_requests() -> None:
    engine = make_engine()
    engine.add(make_request("a", [1, 2], max_tokens=2))
    engine.add(make_request("b", [10], max_tokens=1))
    events = engine.step()
    assert [(e.request_id, e.token_ids, e.finish_reason) for e in events] == [
        ("a", (3,), None),
        ("b", (11,), FinishReason.LENGTH),
    ]
    assert engine.has_work
    engine.step()
    assert not engine.has_work


def test_the_step_log_says_who_shared_each_step() -> None:
    engine = make_engine()
    engine.add(make_request("a", [1, 2, 3], max_tokens=3))
    engine.step()
    engine.add(make_request("b", [10], max_tokens=1))
    engine.step()
    assert [record.rows for record in engine.recorder.step_log] == [
        (("a", 3),),
        (("a", 1), ("b", 1)),
    ]


def test_a_step_that_raises_ends_its_own_requests_and_the_engine_goes_on() -> None:
    def explode_once(plan: StepPlan) -> None:
        if plan.step == 2:
            raise RuntimeError("CUDA error: the prompt of somebody")

    engine = make_engine(
        ShadowExecutor(before_step=explode_once), max_num_seqs=2, max_num_batched_tokens=8
    )
    for name in "abc":
        engine.add(make_request(name, [1, 2], max_tokens=3))
    engine.step()
    failed = engine.step()
    assert {e.request_id: e.finish_reason for e in failed} == dict.fromkeys(
        "ab", FinishReason.ERROR
    )
    for event in failed:
        assert event.error is not None
        assert event.error.code == "request_failed"
        assert "somebody" not in event.error.message
    engine.check()
    tokens = [t for _ in range(3) for e in engine.step() for t in e.token_ids]
    assert tokens == solo_output([1, 2], 3)
    stats = engine.stats()
    assert stats.failed_steps == 1
    assert stats.finished == {FinishReason.ERROR: 2, FinishReason.LENGTH: 1}
    assert stats.kv_usage == 0.0


def test_books_that_do_not_balance_after_a_failed_step_are_fatal() -> None:
    def explode(plan: StepPlan) -> None:
        raise RuntimeError

    engine = make_engine(ShadowExecutor(before_step=explode))
    engine.add(make_request("a", [1]))
    engine.scheduler.blocks.pool._free.pop()
    engine._check_every_step = False
    with pytest.raises(InvariantError, match="every_block_has_one_state"):
        engine.step()


def test_a_request_that_can_never_fit_ends_with_an_error_event() -> None:
    engine = make_engine(ShadowExecutor(make_model_info(num_blocks=2, block_size=4)))
    (event,) = engine.add(make_request("big", range(9), max_tokens=1))
    assert event.finish_reason is FinishReason.ERROR
    assert event.error is not None
    assert event.error.code == "context_length_exceeded"
    assert not engine.has_work


def test_the_engine_may_not_be_touched_from_another_thread() -> None:
    engine, caught = make_engine(), []

    def touch() -> None:
        for call in (engine.step, engine.close, lambda: engine.abort("a")):
            try:
                call()
            except WrongThreadError as error:
                caught.append(error)

    thread = threading.Thread(target=touch)
    thread.start()
    thread.join()
    assert len(caught) == 3


def test_stats_count_what_happened() -> None:
    engine = make_engine()
    engine.add(make_request("a", range(9), max_tokens=2))
    while engine.has_work:
        engine.step()
    engine.add(make_request("b", range(9), max_tokens=2))
    engine.step()
    assert engine.stats().num_running == 1
    assert engine.stats().kv_usage > 0
    engine.abort("b")
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_usage) == (0, 0, 0.0)
    assert (stats.prompt_tokens, stats.cached_tokens, stats.generated_tokens) == (18, 8, 3)
    assert stats.computed_tokens == 9 + 1 + 1
    assert stats.finished == {FinishReason.LENGTH: 1, FinishReason.ABORT: 1}
