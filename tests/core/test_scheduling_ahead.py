"""What the scheduler promises when a step is scheduled while the one before is in flight."""

from __future__ import annotations

from collections import deque

import pytest

from cb_backend.core.invariants import check_plan, check_scheduler
from cb_backend.core.pool_resize import resize_pool
from cb_backend.core.request import FinishReason, RequestStatus
from cb_backend.core.scheduler_limits import SchedulerLimits
from cb_backend.core.step_io import StepPlan
from cb_backend.errors import ErrorInfo, InternalError
from tests.core.driver import Driver, make_limits, shares
from tests.fakes import make_request, next_by_hashing, solo_output


class AheadDriver(Driver):
    """`launch` schedules, `land` takes in the oldest result; `step` does one each, launch first."""

    def __init__(self, limits: SchedulerLimits) -> None:
        super().__init__(limits)
        self.in_flight: deque[StepPlan] = deque()

    def launch(self) -> StepPlan:
        plan = self.scheduler.schedule()
        check_plan(self.scheduler, plan)
        self.in_flight.append(plan)
        check_scheduler(self.scheduler)
        return plan

    def land(self) -> None:
        plan = self.in_flight.popleft()
        result = self.executor.launch(plan).result()
        self.take(self.scheduler.update(plan, result, now=float(plan.step)))
        check_scheduler(self.scheduler)

    def fail(self) -> None:
        plan, error = self.in_flight.popleft(), ErrorInfo("request_failed", "boom")
        self.take(self.scheduler.fail(plan, error, now=float(plan.step)))
        check_scheduler(self.scheduler)

    def step(self) -> StepPlan:
        if not self.in_flight:
            self.launch()
        if self.scheduler.has_work and not self.scheduler.only_awaits:
            self.launch()
        plan = self.in_flight[0]
        self.land()
        return plan


def test_the_token_on_its_way_has_a_row_at_once_and_its_end_is_foreseen() -> None:
    driver = AheadDriver(make_limits())
    driver.add(make_request("a", range(10), max_tokens=3))
    assert [shares(driver.launch()) for _ in range(2)] == [{"a": 10}, {"a": 1}]
    driver.land()
    assert shares(driver.launch()) == {"a": 1}
    driver.land()
    assert driver.scheduler.only_awaits
    assert shares(driver.launch()) == {}, "its third token is in flight, and is never read"
    driver.land()
    assert driver.output["a"] == solo_output(range(10), 3, next_by_hashing)
    assert driver.ended == {"a": FinishReason.LENGTH}


def test_every_output_is_the_one_of_step_after_step() -> None:
    driver = AheadDriver(make_limits(num_blocks=24, max_num_batched_tokens=9, max_prefill_chunk=5))
    prompts = {f"r{n}": list(range(n, 3 * n + 1)) for n in range(8)}
    for name, prompt in prompts.items():
        driver.add(make_request(name, prompt, max_tokens=9))
    driver.run()
    for name, prompt in prompts.items():
        assert driver.output[name] == solo_output(prompt, 9, next_by_hashing)


def test_a_stop_token_leaves_an_orphan_whose_token_is_dropped() -> None:
    expected = solo_output([3, 4], 5, next_by_hashing)
    driver = AheadDriver(make_limits())
    driver.add(make_request("a", [3, 4], max_tokens=9, stop_token_ids=[expected[1]]))
    for _ in range(2):
        driver.launch()
    driver.land()
    orphan = driver.launch()
    driver.land()
    assert driver.ended == {"a": FinishReason.STOP}
    assert shares(orphan) == {"a": 1}
    assert driver.scheduler.blocks.pool.num_in_use == 0, "whoever gets them writes later"
    driver.land()
    assert driver.output["a"] == expected[:2]


def test_a_preempted_request_gets_the_token_that_was_in_flight() -> None:
    driver = AheadDriver(make_limits(num_blocks=9, enable_prefix_caching=False))
    prompts = {name: list(range(i, i + 6)) for i, name in enumerate("abc")}
    driver.add(*(make_request(name, p, max_tokens=16) for name, p in prompts.items()))
    while not driver.scheduler.planner.num_preemptions:
        driver.launch()
        if len(driver.in_flight) > 1 and not driver.scheduler.planner.num_preemptions:
            driver.land()
    (preempted,) = driver.scheduler.waiting
    assert preempted.status is RequestStatus.PREEMPTED
    name, before = preempted.request_id, preempted.num_tokens
    assert name in shares(driver.in_flight[0])
    assert name not in shares(driver.in_flight[1])
    driver.land()
    assert preempted.num_tokens == before + 1
    assert driver.scheduler.waiting.num_tokens == before + 1
    driver.land()
    driver.run()
    for name, prompt in prompts.items():
        assert driver.output[name] == solo_output(prompt, 16, next_by_hashing)


def test_a_block_is_found_only_when_the_step_that_filled_it_is_over() -> None:
    driver = AheadDriver(make_limits(block_size=4))
    driver.add(make_request("a", range(8), max_tokens=8))
    driver.launch()
    driver.add(make_request("b", range(8), max_tokens=8))
    assert shares(driver.launch()) == {"a": 1, "b": 8}
    driver.land()
    driver.add(make_request("c", [*range(8), 8], max_tokens=8))
    assert shares(driver.launch()) == {"a": 1, "b": 1, "c": 1}
    driver.land()
    driver.land()
    driver.run()
    assert driver.output["c"] == solo_output(range(9), 8, next_by_hashing)


def test_an_id_that_is_used_again_does_not_get_what_was_in_flight() -> None:
    driver = AheadDriver(make_limits())
    driver.add(make_request("a", [1, 2], max_tokens=5))
    driver.launch()
    driver.abort("a")
    driver.ended.clear()
    driver.add(make_request("a", [7, 8, 9], max_tokens=5))
    driver.launch()
    driver.land()
    assert driver.output["a"] == []
    driver.land()
    driver.run()
    assert driver.output["a"] == solo_output([7, 8, 9], 5, next_by_hashing)


def test_a_failed_step_ends_its_requests_once_and_the_step_behind_it_can_fail_too() -> None:
    driver = AheadDriver(make_limits())
    driver.add(make_request("a", [1, 2]))
    driver.launch()
    driver.add(make_request("new", [3]))
    driver.launch()
    driver.fail()
    assert driver.ended == {"a": FinishReason.ERROR}
    driver.fail()
    assert driver.ended == dict.fromkeys(("a", "new"), FinishReason.ERROR)
    assert driver.scheduler.blocks.pool.num_in_use == 0


def test_a_row_that_fails_alone_leaves_an_orphan() -> None:
    driver = AheadDriver(make_limits())
    driver.add(make_request("bad", [1, 2]), make_request("good", [1, 2], max_tokens=4))
    driver.executor.fail_rows = {"bad"}
    driver.run()
    assert driver.ended == {"bad": FinishReason.ERROR, "good": FinishReason.LENGTH}
    assert driver.output["good"] == solo_output([1, 2], 4, next_by_hashing)


def test_the_pool_is_not_resized_under_a_step_in_flight() -> None:
    driver = AheadDriver(make_limits())
    driver.add(make_request("a", [1, 2]))
    driver.launch()
    with pytest.raises(InternalError, match="one is in flight"):
        resize_pool(driver.scheduler, 60, fewest=1)


def test_results_out_of_order_are_an_error() -> None:
    driver = AheadDriver(make_limits())
    driver.add(make_request("a", [1, 2]))
    plans = [driver.launch() for _ in range(2)]
    with pytest.raises(InternalError, match="step 2 lands before step 1"):
        driver.scheduler.fail(plans[1], ErrorInfo("request_failed", "boom"), now=0.0)


def test_a_prompt_whose_first_token_arrives_after_a_preemption_is_pinned_all_the_same() -> None:
    driver = AheadDriver(make_limits(num_blocks=5))
    driver.add(make_request("first", range(8), max_tokens=4))
    driver.add(make_request("kept", range(50, 58), max_tokens=3, pin_s=1000.0))
    driver.launch()
    driver.launch()  # no block is left for its second token
    assert driver.scheduler.planner.num_preemptions == 1
    driver.land()
    assert len(driver.output["kept"]) == 1
    driver.run()
    assert driver.output["kept"] == solo_output(range(50, 58), 3, next_by_hashing)
    assert driver.scheduler.blocks.pool.num_in_use == 2
