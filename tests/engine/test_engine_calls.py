"""What other threads ask of the engine between two steps, and what it looks after by itself."""

from __future__ import annotations

import threading

import pytest

from cb_backend.engine import engine_thread
from cb_backend.engine.controls import resize_kv_pool
from cb_backend.engine.lifecycle import EngineStatus
from cb_backend.errors import (
    EngineDeadError,
    EngineNotReadyError,
)
from tests.engine.conftest import Gate, Start, eventually, ready
from tests.fakes import ShadowExecutor, make_model_info, make_request
from tests.receivers import RecordingReceiver


def test_a_call_runs_on_the_engine_thread_between_two_steps(start: Start) -> None:
    gate = Gate()
    thread, receiver = ready(start(ShadowExecutor(before_step=gate))), RecordingReceiver()
    thread.submit(make_request("a", [1], max_tokens=5), receiver)
    assert gate.reached.wait(10.0)
    answer = thread.call(lambda engine: (threading.current_thread().name, engine.recorder.steps))
    assert not answer.done(), "a step is running"
    gate.open()
    assert answer.result(10.0) == ("cb-engine", 1)
    receiver.wait_for_end("a")


def test_an_error_in_a_call_is_the_callers_and_nobody_elses(start: Start) -> None:
    thread, receiver = ready(start(ShadowExecutor())), RecordingReceiver()
    with pytest.raises(ZeroDivisionError):
        thread.call(lambda engine: 1 // 0).result(10.0)
    thread.submit(make_request("a", [1], max_tokens=5), receiver)
    receiver.wait_for_end("a")
    assert thread.life.status is EngineStatus.READY


def test_a_call_that_waits_when_the_engine_dies_is_told(start: Start) -> None:
    gate = Gate()
    thread = ready(start(ShadowExecutor(before_step=gate), step_timeout_s=0.2))
    thread.submit(make_request("a", [1], max_tokens=5), RecordingReceiver())
    assert gate.reached.wait(10.0)
    answer = thread.call(lambda engine: None)
    with pytest.raises(EngineDeadError, match="running for more than"):
        answer.result(10.0)
    with pytest.raises(EngineDeadError):
        thread.call(lambda engine: None)
    gate.open()


def test_a_stopped_engine_takes_no_calls(start: Start) -> None:
    thread = ready(start(ShadowExecutor()))
    thread.close()
    with pytest.raises(EngineNotReadyError, match="shutting down"):
        thread.call(lambda engine: None)


def test_a_pool_that_cannot_follow_its_new_size_is_the_engines_end(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: ShadowExecutor, change: object) -> None:
        raise MemoryError

    monkeypatch.setattr(ShadowExecutor, "resize", fail)
    thread = ready(start(ShadowExecutor(make_model_info(max_model_len=40))))
    answer = thread.call(lambda engine: resize_kv_pool(engine, 30))
    with pytest.raises(EngineDeadError, match="is lost"):
        answer.result(10.0)
    eventually(lambda: thread.life.is_dead)


def test_an_idle_engine_gives_memory_to_a_neighbour(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_thread, "LOOK_AROUND_INTERVAL_S", 0.01)
    executor = ShadowExecutor(make_model_info(max_model_len=40))
    thread = ready(start(executor, min_free_gib=1.0))
    executor.free = 0
    eventually(lambda: thread.engine.scheduler.blocks.pool.num_blocks == 10)
