"""The thread's life: load, serve, drain, crash, hang. Tests wait on events, never on the clock."""

from __future__ import annotations

import threading

import pytest

from cb_backend.core.request import FinishReason
from cb_backend.engine.lifecycle import EngineStatus
from cb_backend.errors import (
    EngineDeadError,
    EngineNotReadyError,
    EngineUnavailableError,
    ModelError,
)
from tests.engine.conftest import Gate, Start, eventually, ready
from tests.fakes import ShadowExecutor, make_request, solo_output
from tests.receivers import RecordingReceiver


def test_a_request_runs_to_its_end(start: Start) -> None:
    thread, receiver = ready(start(ShadowExecutor())), RecordingReceiver()
    thread.submit(make_request("a", [1, 2, 3], max_tokens=5), receiver)
    assert receiver.wait_for_end("a").finish_reason is FinishReason.LENGTH
    assert receiver.tokens_of("a") == solo_output([1, 2, 3], 5)


def test_many_submitters_get_their_own_tokens(start: Start) -> None:
    thread, receiver = ready(start(ShadowExecutor())), RecordingReceiver()

    def submit(worker: int) -> None:
        for number in range(20):
            prompt = [worker * 100 + number]
            thread.submit(make_request(f"{worker}/{number}", prompt, max_tokens=7), receiver)

    submitters = [threading.Thread(target=submit, args=(worker,)) for worker in range(4)]
    for submitter in submitters:
        submitter.start()
    for submitter in submitters:
        submitter.join()
    for worker in range(4):
        for number in range(20):
            name = f"{worker}/{number}"
            receiver.wait_for_end(name)
            assert receiver.tokens_of(name) == solo_output([worker * 100 + number], 7)


def test_while_the_model_loads_requests_are_refused_and_afterwards_taken(start: Start) -> None:
    loaded = threading.Event()

    def load() -> ShadowExecutor:
        assert loaded.wait(10.0)
        return ShadowExecutor()

    thread, receiver = start(load), RecordingReceiver()
    with pytest.raises(EngineNotReadyError, match="still loading"):
        thread.submit(make_request("early", [1]), receiver)
    with pytest.raises(EngineNotReadyError):
        thread.engine  # noqa: B018 -- the property raises
    loaded.set()
    ready(thread).submit(make_request("late", [1]), receiver)
    receiver.wait_for_end("late")
    assert receiver.of("early") == []


def test_a_model_that_cannot_be_loaded_leaves_a_dead_engine_that_says_why(start: Start) -> None:
    def load() -> ShadowExecutor:
        raise EngineUnavailableError("no such folder")

    thread = start(load)
    eventually(lambda: thread.life.status is EngineStatus.DEAD)
    with pytest.raises(EngineDeadError, match="no such folder"):
        thread.submit(make_request("a", [1]), RecordingReceiver())
    with pytest.raises(EngineDeadError, match="no such folder"):
        thread.engine  # noqa: B018 -- the property raises


def test_a_model_that_is_wrong_is_told_in_one_line_without_a_traceback(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    def load() -> ShadowExecutor:
        raise ModelError("its weights lack 'lm_head'")

    thread = start(load)
    eventually(thread.life.ended.is_set)
    (record,) = caplog.records
    assert record.exc_info is None
    assert "the model cannot be served: its weights lack 'lm_head'" in record.getMessage()
    with pytest.raises(EngineDeadError, match="lack 'lm_head'"):
        thread.submit(make_request("a", [1]), RecordingReceiver())


def test_an_engine_that_was_closed_while_it_loaded_has_stopped_even_if_loading_failed(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    """At the end of an interpreter imports fail: of that nobody needs to hear."""
    closed = threading.Event()

    def load() -> ShadowExecutor:
        assert closed.wait(10.0)
        raise RuntimeError("can't register atexit after shutdown")

    thread = start(load)
    thread.drain()
    closed.set()
    eventually(thread.life.ended.is_set)
    assert thread.life.status is EngineStatus.STOPPED
    assert not caplog.records


def test_an_abort_takes_effect_before_the_next_step(start: Start) -> None:
    gate = Gate()
    executor = ShadowExecutor(before_step=gate)
    thread, receiver = ready(start(executor)), RecordingReceiver()
    thread.submit(make_request("a", [1], max_tokens=100), receiver)
    assert gate.reached.wait(10.0)
    thread.abort("a")
    gate.open()
    assert receiver.wait_for_end("a").finish_reason is FinishReason.ABORT
    assert len(executor.plans) == 1
    assert thread.engine.stats().kv_usage == 0.0


def test_an_abort_while_queued_never_computes_anything(start: Start) -> None:
    gate = Gate()
    executor = ShadowExecutor(before_step=gate)
    thread, receiver = ready(start(executor)), RecordingReceiver()
    thread.submit(make_request("running", [1], max_tokens=3), receiver)
    assert gate.reached.wait(10.0)
    thread.submit(make_request("queued", [1], max_tokens=3), receiver)
    thread.abort("queued")
    gate.open()
    assert receiver.wait_for_end("queued").finish_reason is FinishReason.ABORT
    receiver.wait_for_end("running")
    assert all(row.request_id == "running" for plan in executor.plans for row in plan.rows)


def test_draining_lets_running_requests_finish_and_refuses_new_ones(start: Start) -> None:
    gate = Gate()
    executor = ShadowExecutor(before_step=gate)
    thread, receiver = ready(start(executor)), RecordingReceiver()
    thread.submit(make_request("a", [1], max_tokens=6), receiver)
    assert gate.reached.wait(10.0)
    thread.drain()
    with pytest.raises(EngineNotReadyError, match="shutting down"):
        thread.submit(make_request("late", [1]), receiver)
    gate.open()
    assert receiver.wait_for_end("a").finish_reason is FinishReason.LENGTH
    assert executor.closed.wait(10.0)
    eventually(lambda: thread.life.status is EngineStatus.STOPPED)


def test_a_drain_that_takes_too_long_ends_what_is_left_with_an_error(start: Start) -> None:
    gate = Gate()
    thread = ready(start(ShadowExecutor(before_step=gate), drain_timeout_s=1e-9))
    receiver = RecordingReceiver()
    thread.submit(make_request("a", [1], max_tokens=200), receiver)
    assert gate.reached.wait(10.0)
    thread.drain()
    gate.open()
    event = receiver.wait_for_end("a")
    assert event.error is not None
    assert event.error.message == "the engine has shut down"


def test_close_may_be_called_twice_and_joins_the_thread(start: Start) -> None:
    thread = ready(start(ShadowExecutor()))
    thread.close()
    thread.close()
    assert thread.life.status is EngineStatus.STOPPED
    assert not thread._thread.is_alive()


def test_requests_of_a_receiver_that_is_gone_are_aborted(start: Start) -> None:
    executor = ShadowExecutor()
    thread, gone = ready(start(executor)), RecordingReceiver(gone=True)
    thread.submit(make_request("a", [1], max_tokens=100), gone)
    eventually(lambda: thread.engine.stats().finished.get(FinishReason.ABORT) == 1)
    assert len(executor.plans) == 1


def test_forks_are_queued_with_their_parent_and_no_step_between(start: Start) -> None:
    executor = ShadowExecutor()
    thread = ready(start(executor))
    receiver = RecordingReceiver()
    forks = [make_request(f"p.{n}", [1, 2, 3], max_tokens=4, fork_of="p") for n in range(3)]
    thread.submit(make_request("p", [1, 2, 3], max_tokens=4), receiver, forks)
    for request_id in ("p", "p.0", "p.1", "p.2"):
        receiver.wait_for_end(request_id)
        assert receiver.tokens_of(request_id) == solo_output([1, 2, 3], 4)
    first, second, *_ = executor.plans
    assert [row.request_id for row in first.rows] == ["p"]
    assert len(second.rows) == 4


def test_at_the_drains_deadline_readers_are_told_before_the_cache_is_saved(start: Start) -> None:
    gate, saving = Gate(), threading.Event()

    class SlowDisk(ShadowExecutor):
        def save_blocks(self, path: str, blocks: object) -> None:
            assert saving.wait(10.0)

    thread = ready(start(SlowDisk(before_step=gate), drain_timeout_s=1e-9, cache_file="kept"))
    receiver = RecordingReceiver()
    thread.submit(make_request("a", [1], max_tokens=200), receiver)
    assert gate.reached.wait(10.0)
    thread.drain()
    gate.open()
    assert receiver.wait_for_end("a").error is not None
    saving.set()


def test_idle_time_is_used_until_nothing_is_left_and_not_while_there_is_work(start: Start) -> None:
    gate, receiver = Gate(), RecordingReceiver()
    executor = ShadowExecutor(before_step=gate)
    executor.idle_pieces = 10**9
    thread = ready(start(executor))
    eventually(lambda: executor.idle_pieces < 10**9)
    thread.submit(make_request("a", [1], max_tokens=20), receiver)
    assert gate.reached.wait(10.0)
    left = executor.idle_pieces
    gate.open()
    assert receiver.wait_for_end("a").error is None
    eventually(lambda: executor.idle_pieces < left)
    executor.idle_pieces = 3
    eventually(lambda: executor.idle_pieces == -1)
    thread.submit(make_request("b", [1], max_tokens=1), receiver)
    assert receiver.wait_for_end("b").error is None
