"""The thread's life: load, serve, drain, crash, hang. Tests wait on events, never on the clock."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from cb_backend.config import EngineConfig
from cb_backend.core.request import FinishReason
from cb_backend.core.step_io import StepPlan
from cb_backend.engine import engine_thread
from cb_backend.engine.controls import resize_kv_pool
from cb_backend.engine.engine import Engine
from cb_backend.engine.engine_thread import EngineThread
from cb_backend.engine.lifecycle import EngineStatus
from cb_backend.errors import (
    EngineDeadError,
    EngineNotReadyError,
    EngineUnavailableError,
    ModelError,
)
from tests.fakes import (
    RecordingReceiver,
    ShadowExecutor,
    make_model_info,
    make_request,
    solo_output,
)

Start = Callable[..., EngineThread]


def eventually(condition: Callable[[], bool]) -> None:
    """Another thread is about to make this true; the limit is for a test that fails."""
    gate, deadline = threading.Event(), time.monotonic() + 10.0
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        gate.wait(0.001)


@pytest.fixture
def start() -> Iterator[Start]:
    threads: list[EngineThread] = []

    def start_thread(
        executor: ShadowExecutor | Callable[[], ShadowExecutor],
        *,
        step_timeout_s: float = 30.0,
        drain_timeout_s: float = 10.0,
        **settings: object,
    ) -> EngineThread:
        def build() -> Engine:
            made = executor() if callable(executor) else executor
            config = EngineConfig(model="fake", check_invariants=True, **settings)  # type: ignore[arg-type]
            return Engine(config, made, clock=time.monotonic)

        thread = EngineThread(build, step_timeout_s=step_timeout_s, drain_timeout_s=drain_timeout_s)
        threads.append(thread)
        thread.start()
        return thread

    yield start_thread
    for thread in threads:
        thread.close()


def ready(thread: EngineThread) -> EngineThread:
    eventually(lambda: thread.life.status is not EngineStatus.LOADING)
    assert thread.life.status is EngineStatus.READY
    return thread


class Gate:
    """A step waits here until it is opened; `reached` tells that it does."""

    def __init__(self) -> None:
        self.reached, self._open = threading.Event(), threading.Event()

    def __call__(self, plan: StepPlan) -> None:
        self.reached.set()
        assert self._open.wait(20.0)

    def open(self) -> None:
        self._open.set()


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
