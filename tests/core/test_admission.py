"""New work is refused with the number that stood in its way and a time to come back."""

from __future__ import annotations

import math

import pytest

from cb_backend.core.admission import AdmissionLimits, refusal
from cb_backend.core.policies import DeadlinePolicy, Policy
from cb_backend.core.rates import StepRates
from cb_backend.core.request import Request
from cb_backend.errors import CBError, DeadlineError, OverloadedError
from tests.core.driver import Driver, make_limits
from tests.fakes import make_request


def rates(tokens_per_s: float = 100.0) -> StepRates:
    known = StepRates()
    for _ in range(20):
        known.observe(10, 10 / tokens_per_s)
    return known


def driver_with_queue(policy: Policy, lengths: list[int]) -> Driver:
    """One request runs; the others, prompts of these lengths, wait for its seat."""
    driver = Driver(make_limits(max_num_seqs=1, num_blocks=1000), policy)
    driver.add(make_request("running", [1], max_tokens=99))
    driver.step()
    for number, length in enumerate(lengths):
        driver.add(make_request(f"w{number}", range(length), deadline=50.0))
    return driver


def ask(
    driver: Driver,
    request: Request,
    *,
    max_num_waiting: int = 100,
    max_waiting_tokens: int | None = None,
    known: StepRates | None = None,
) -> CBError | None:
    limits = AdmissionLimits(max_num_waiting=max_num_waiting, max_waiting_tokens=max_waiting_tokens)
    return refusal(request, driver.scheduler, known or rates(), limits, now=0.0)


@pytest.mark.parametrize(("cap", "refused"), [(2, True), (3, False)])
def test_a_full_queue_refuses(cap: int, refused: bool) -> None:
    driver = driver_with_queue(Policy(), [5, 5])
    error = ask(driver, make_request("new", [1]), max_num_waiting=cap)
    assert isinstance(error, OverloadedError) == refused
    if error is not None:
        assert "3 requests run or wait, the limit is 3" in error.message


@pytest.mark.parametrize(("cap", "refused"), [(304, True), (305, False)])
def test_too_many_waiting_tokens_refuse_and_say_when_to_come_back(cap: int, refused: bool) -> None:
    driver = driver_with_queue(Policy(), [200, 100])
    error = ask(driver, make_request("new", range(5)), max_waiting_tokens=cap)
    assert isinstance(error, OverloadedError) == refused
    if error is not None:
        assert "300 prompt tokens wait, the limit is 304" in error.message


def test_the_time_to_come_back_is_the_excess_at_the_measured_rate() -> None:
    driver = driver_with_queue(Policy(), [200, 200])
    error = ask(driver, make_request("new", range(100)), max_waiting_tokens=200)
    assert error is not None
    assert error.retry_after_s == pytest.approx(3.0)  # 300 tokens too many at 100 a second


def test_a_prompt_longer_than_the_token_limit_is_let_in_alone() -> None:
    driver = driver_with_queue(Policy(), [])
    assert ask(driver, make_request("long", range(100)), max_waiting_tokens=50) is None


def test_before_anything_is_measured_a_second_is_named() -> None:
    driver = driver_with_queue(Policy(), [5])
    error = ask(driver, make_request("new", [1]), max_num_waiting=1, known=StepRates())
    assert error is not None
    assert error.retry_after_s == 1.0


@pytest.mark.parametrize(("deadline", "refused"), [(1.0, True), (4.0, False), (math.inf, False)])
def test_a_deadline_that_cannot_be_met_is_refused_with_an_estimate(
    deadline: float, refused: bool
) -> None:
    """130 tokens of prompt at 100 a second, then 100 steps of a token at 0.01 s: about 2.3 s."""
    driver = driver_with_queue(DeadlinePolicy(), [100])
    request = make_request("new", range(30), max_tokens=100, deadline=deadline)
    error = ask(driver, request)
    assert isinstance(error, DeadlineError) == refused
    if error is not None:
        assert "would take about" in error.message
        assert "its deadline is in 1.00 s" in error.message


def test_work_with_later_deadlines_does_not_count_against_an_earlier_one() -> None:
    request = make_request("new", range(10), max_tokens=1, deadline=0.5)
    assert ask(driver_with_queue(DeadlinePolicy(), [2000]), request) is None


def test_other_policies_do_not_look_at_deadlines() -> None:
    request = make_request("new", range(10), max_tokens=100, deadline=0.0)
    assert ask(driver_with_queue(Policy(), []), request) is None


def test_forks_count_towards_the_limit() -> None:
    driver = driver_with_queue(Policy(), [])
    driver.add(make_request("parent", range(9)))
    driver.add(make_request("fork", range(9), fork_of="parent"))
    assert isinstance(ask(driver, make_request("new", [1]), max_num_waiting=2), OverloadedError)
