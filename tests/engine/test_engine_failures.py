"""Steps that fail, crash or hang: nobody waits for ever, and nobody else is touched."""

from __future__ import annotations

import threading

import pytest

from cb_backend.core.request import FinishReason
from cb_backend.core.step_io import StepPlan
from cb_backend.engine.engine import Engine
from cb_backend.engine.lifecycle import EngineStatus
from cb_backend.errors import (
    EngineDeadError,
)
from tests.engine.conftest import Gate, Start, eventually, ready
from tests.fakes import ShadowExecutor, make_request, solo_output
from tests.receivers import RecordingReceiver


def test_a_failed_step_leaves_the_engine_ready(start: Start) -> None:
    def explode(plan: StepPlan) -> None:
        if any(row.request_id == "bad" for row in plan.rows):
            raise ValueError

    thread, receiver = ready(start(ShadowExecutor(before_step=explode))), RecordingReceiver()
    thread.submit(make_request("bad", [1]), receiver)
    event = receiver.wait_for_end("bad")
    assert event.error is not None
    assert event.error.code == "request_failed"
    thread.submit(make_request("good", [1], max_tokens=4), receiver)
    receiver.wait_for_end("good")
    assert receiver.tokens_of("good") == solo_output([1], 4)
    assert thread.life.status is EngineStatus.READY


def test_a_crash_ends_every_stream_and_refuses_later_ones(start: Start) -> None:
    gate = Gate()
    thread, receiver = ready(start(ShadowExecutor(before_step=gate))), RecordingReceiver()
    thread.submit(make_request("a", [1], max_tokens=50), receiver)
    assert gate.reached.wait(10.0)
    thread.submit(make_request("b", [1], max_tokens=50), receiver)
    thread.engine.scheduler.blocks.pool._free.pop()  # a bug of ours, found by the next check
    gate.open()
    for name in "ab":
        event = receiver.wait_for_end(name)
        assert event.error is not None
        assert event.error.code == "engine_dead"
    assert thread.life.status is EngineStatus.DEAD
    with pytest.raises(EngineDeadError, match="every_block_has_one_state"):
        thread.submit(make_request("c", [1]), receiver)


def test_a_step_that_hangs_is_noticed_and_every_stream_ends(start: Start) -> None:
    gate = Gate()
    thread = ready(start(ShadowExecutor(before_step=gate), step_timeout_s=0.2))
    receiver = RecordingReceiver()
    thread.submit(make_request("a", [1], max_tokens=50), receiver)
    assert gate.reached.wait(10.0)
    thread.submit(make_request("queued", [1], max_tokens=50), receiver)
    for name in ("a", "queued"):
        event = receiver.wait_for_end(name)
        assert event.error is not None
        assert event.error.code == "engine_dead"
        assert "running for more than 0.2 s" in event.error.message
    assert thread.life.status is EngineStatus.DEAD
    with pytest.raises(EngineDeadError, match="running for more than"):
        thread.submit(make_request("late", [1]), receiver)
    gate.open()  # the step comes back, too late: nothing of it may be delivered
    eventually(lambda: not thread._thread.is_alive())
    assert [e.finish_reason for e in receiver.of("a")] == [FinishReason.ERROR]


def test_a_call_that_hangs_is_noticed_like_a_step(start: Start) -> None:
    thread = ready(start(ShadowExecutor(), step_timeout_s=0.2))
    release, receiver = threading.Event(), RecordingReceiver()
    hanging = thread.call(lambda engine: release.wait(20.0))
    queued = thread.call(lambda engine: None)
    thread.submit(make_request("a", [1]), receiver)
    try:
        for answer in (hanging, queued):
            with pytest.raises(EngineDeadError):
                answer.result(10.0)
        eventually(lambda: len(receiver.of("a")) == 1)
        assert receiver.of("a")[0].error is not None
    finally:
        release.set()
    thread._thread.join(10.0)
    assert not thread._thread.is_alive()


def test_a_call_that_ends_the_thread_leaves_nobody_waiting(start: Start) -> None:
    def leave(engine: Engine) -> None:
        raise SystemExit

    thread = ready(start(ShadowExecutor()))
    for function in (leave, lambda engine: None):
        with pytest.raises(EngineDeadError):
            thread.call(function).result(10.0)
    assert thread.life.ended.wait(10.0)
