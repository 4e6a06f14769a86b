"""An engine whose executor runs ahead: one step is in flight while the host works on another."""

from __future__ import annotations

import pytest

from cb_backend.config import EngineConfig
from cb_backend.core.request import FinishReason
from cb_backend.core.step_io import PendingStep, StepPlan, StepResult
from cb_backend.engine.engine import Engine
from cb_backend.engine.lifecycle import EngineStatus
from tests.engine.conftest import Start, ready
from tests.fakes import ShadowExecutor, make_model_info, make_request, solo_output
from tests.receivers import RecordingReceiver

HOST_S, DEVICE_S = 1.0, 10.0  # of a launch, and of a step of the device


class Device:
    """A shadow executor on a clock: a launch takes the host a second, and a step, once the device
    has come to it, ten seconds more."""

    def __init__(self, fail_launch: int = 0, fail_result: int = 0) -> None:
        self.now = self.free_at = 0.0
        self.log: list[str] = []
        self._fail_launch, self._fail_result = fail_launch, fail_result
        info = make_model_info(runs_ahead=True)
        self.executor = ShadowExecutor(
            info, before_launch=self._before_launch, before_step=self._before_step
        )
        config = EngineConfig(model="fake", check_invariants=True, max_num_seqs=2)
        self.engine = Engine(config, self.executor, clock=lambda: self.now)
        self._ends: list[float] = []

    def _before_launch(self, plan: StepPlan) -> None:
        self.log.append(f"launch {plan.step}")
        self.now += HOST_S
        if plan.step == self._fail_launch:
            raise RuntimeError("out of memory")
        self.free_at = max(self.free_at, self.now) + DEVICE_S
        self._ends.append(self.free_at)

    def _before_step(self, plan: StepPlan) -> None:
        self.log.append(f"result {plan.step}")
        self.now = max(self.now, self._ends.pop(0))
        if plan.step == self._fail_result:
            raise RuntimeError("illegal memory access")


def test_the_next_step_is_launched_before_a_result_is_asked_for() -> None:
    device = Device()
    engine = device.engine
    engine.add(make_request("a", [1, 2], max_tokens=3))
    assert engine.step() == []
    tokens = []
    while engine.has_work:
        tokens += [token_id for event in engine.step() for token_id in event.token_ids]
    assert tokens == solo_output([1, 2], 3)
    assert device.log == ["launch 1", "launch 2", "result 1", "launch 3", "result 2", "result 3"]


def test_the_host_is_hidden_and_a_step_lasts_from_the_end_of_the_one_before() -> None:
    device = Device()
    device.engine.add(make_request("a", [1, 2], max_tokens=5))
    while device.engine.has_work:
        device.engine.step()
    assert device.now == HOST_S + 5 * DEVICE_S
    seconds = [record.seconds for record in device.engine.recorder.step_log]
    assert seconds == [HOST_S + DEVICE_S, *[DEVICE_S] * 4]


def test_a_request_may_leave_and_another_join_while_a_step_is_in_flight() -> None:
    engine = Device().engine
    engine.add(make_request("a", [1], max_tokens=50))
    engine.add(make_request("b", [5], max_tokens=4))
    events = engine.step()
    events += engine.abort("a")
    engine.add(make_request("c", [9], max_tokens=3))
    while engine.has_work:
        events += engine.step()
    outputs: dict[str, list[int]] = {"a": [], "b": [], "c": []}
    for event in events:
        outputs[event.request_id] += event.token_ids
    assert outputs == {"a": [], "b": solo_output([5], 4), "c": solo_output([9], 3)}
    assert engine.stats().finished == {FinishReason.ABORT: 1, FinishReason.LENGTH: 2}
    assert engine.stats().kv_usage == 0.0


def test_a_step_that_cannot_be_launched_fails_alone() -> None:
    device = Device(fail_launch=3)
    engine = device.engine
    engine.add(make_request("a", [1], max_tokens=9))
    engine.step()
    engine.add(make_request("b", [5], max_tokens=1))
    assert [event.request_id for event in engine.step()] == ["a"]
    failed = engine.step()  # launches the third, in vain, and has the second's result
    assert [(e.request_id, e.token_ids, e.finish_reason) for e in failed] == [
        ("a", (3,), None),
        ("b", (6,), FinishReason.LENGTH),
        ("a", (), FinishReason.ERROR),
    ]
    assert not engine.has_work
    assert (engine.stats().failed_steps, engine.stats().kv_usage) == (1, 0.0)


def test_a_step_that_fails_on_the_device_takes_the_one_behind_it_with_it() -> None:
    engine = Device(fail_result=2).engine
    engine.add(make_request("a", [1], max_tokens=9))
    engine.step()
    engine.step()
    engine.add(make_request("behind", [5], max_tokens=9))
    ended = {event.request_id: event.finish_reason for event in engine.step()}
    assert ended == dict.fromkeys(("a", "behind"), FinishReason.ERROR)
    assert not engine.has_work
    assert engine.stats().failed_steps == 2
    engine.add(make_request("after", [7], max_tokens=3))
    tokens = []
    while engine.has_work:
        tokens += [token_id for event in engine.step() for token_id in event.token_ids]
    assert tokens == solo_output([7], 3)


class OneInFlight(ShadowExecutor):
    """Keeps how many steps were in flight whenever one was launched."""

    def __init__(self) -> None:
        super().__init__(make_model_info(runs_ahead=True))
        self.depths: set[int] = set()

    def launch(self, plan: StepPlan) -> PendingStep:
        pending = super().launch(plan)
        self.depths.add(len(self.launched))
        return pending


def test_through_the_thread_every_stream_is_whole_and_at_most_two_steps_are_launched(
    start: Start,
) -> None:
    executor, receiver = OneInFlight(), RecordingReceiver()
    thread = ready(start(executor, max_num_seqs=4))
    for n in range(12):
        thread.submit(make_request(f"r{n}", [n, n + 1], max_tokens=5 + n), receiver)
    for n in range(12):
        receiver.wait_for_end(f"r{n}")
        assert receiver.tokens_of(f"r{n}") == solo_output([n, n + 1], 5 + n)
    assert executor.depths == {1, 2}
    assert thread.life.status is EngineStatus.READY


def test_a_call_meets_no_step_in_flight(start: Start) -> None:
    executor, receiver = ShadowExecutor(make_model_info(runs_ahead=True)), RecordingReceiver()
    thread = ready(start(executor))
    thread.submit(make_request("a", [1], max_tokens=200), receiver)
    for _ in range(20):
        in_flight = thread.call(lambda engine: engine.scheduler.plans_in_flight).result(10.0)
        assert in_flight == ()
    receiver.wait_for_end("a")
    assert receiver.tokens_of("a") == solo_output([1], 200)


def test_a_thread_that_drains_delivers_what_is_in_flight(start: Start) -> None:
    executor, receiver = ShadowExecutor(make_model_info(runs_ahead=True)), RecordingReceiver()
    thread = ready(start(executor, drain_timeout_s=0.0))
    thread.submit(make_request("a", [1], max_tokens=250), receiver)
    receiver.wait_for_tokens("a", 3)
    thread.close()
    assert not executor.launched
    tokens = receiver.tokens_of("a")
    assert tokens == solo_output([1], len(tokens))


def test_what_a_result_says_of_an_orphan_is_dropped() -> None:
    class Talkative(ShadowExecutor):
        def compute(self, plan: StepPlan) -> StepResult:
            result = super().compute(plan)
            return StepResult({**result.token_ids, "stranger": (1,)}, result.failed)

    engine = Engine(
        EngineConfig(model="fake", check_invariants=True),
        Talkative(make_model_info(runs_ahead=True)),
        clock=lambda: 0.0,
    )
    engine.add(make_request("a", [1], max_tokens=9, stop_token_ids=[3]))
    events = []
    while engine.has_work:
        events += engine.step()
    assert [event.token_ids for event in events] == [(2,), (3,)]


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_collecting_nothing_is_nothing(runs_ahead: bool) -> None:
    executor = ShadowExecutor(make_model_info(runs_ahead=runs_ahead))
    engine = Engine(EngineConfig(model="fake"), executor, clock=lambda: 0.0)
    assert engine.collect() == []
    engine.add(make_request("a", [1], max_tokens=2))
    assert len(engine.step() + engine.collect()) == 1
    assert engine.collect() == []


def test_steps_that_fall_with_another_do_not_make_the_device_look_fast() -> None:
    """Both end in one moment: of the second one no time can be told."""
    device = Device(fail_result=2)
    device.engine.add(make_request("a", [1], max_tokens=9))
    while device.engine.has_work:
        device.engine.step()
    assert device.engine.rates.num_steps == 1
    assert device.engine.rates._sum_y == HOST_S + DEVICE_S
