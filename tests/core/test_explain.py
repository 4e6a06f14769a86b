"""Each live request is shown once, with what it waits for."""

from __future__ import annotations

from cb_backend.core.explain import RequestView, explain
from cb_backend.core.rates import StepRates
from tests.core.driver import Driver, make_limits
from tests.fakes import make_request


def views(driver: Driver, rates: StepRates | None = None) -> dict[str, RequestView]:
    shown = explain(driver.scheduler, rates or StepRates(), now=10.0)
    assert len({view.request_id for view in shown}) == len(shown)
    return {view.request_id: view for view in shown}


def test_running_waiting_and_forked_requests_are_told_apart() -> None:
    driver = Driver(make_limits(max_num_seqs=1, max_num_batched_tokens=8, max_prefill_chunk=8))
    driver.add(make_request("runs", range(20), max_tokens=5))
    driver.add(make_request("next", [1]), make_request("later", [2]))
    driver.add(make_request("fork", range(20), fork_of="runs"))
    driver.step()
    seen = views(driver)
    assert {name: view.state for name, view in seen.items()} == {
        "runs": "running",
        "next": "waiting",
        "later": "waiting",
        "fork": "forked",
    }
    assert seen["runs"].waits_for == ""
    assert seen["runs"].num_computed_tokens == 8
    assert seen["next"].waits_for == "a seat: 1 of 1 are taken"
    assert seen["later"].waits_for == "1 before it: a seat: 1 of 1 are taken"
    assert (seen["next"].position, seen["later"].position) == (0, 1)
    assert seen["fork"].waits_for == "the prompt of runs"


def test_a_lack_of_blocks_is_named_with_its_numbers() -> None:
    driver = Driver(make_limits(num_blocks=8, block_size=4))
    driver.add(make_request("runs", range(20), max_tokens=5))
    driver.step()
    driver.add(make_request("big", range(100, 120), max_tokens=5))
    assert views(driver)["big"].waits_for == "KV blocks: it needs 5, 1 are not promised to others"


def test_a_preempted_request_says_so() -> None:
    driver = Driver(make_limits(num_blocks=8, block_size=4, enable_prefix_caching=False))
    for name in "ab":
        driver.add(make_request(name, range(8), max_tokens=20))
    while not driver.scheduler.planner.num_preemptions:
        driver.step()
    view = views(driver)["b"]
    assert (view.state, view.num_preemptions, view.num_blocks) == ("preempted", 1, 0)


def test_estimates_grow_along_the_queue_and_are_missing_before_anything_is_measured() -> None:
    driver = Driver(make_limits(max_num_seqs=1))
    for name in "abc":
        driver.add(make_request(name, range(10), max_tokens=4))
    assert views(driver)["a"].seconds_to_end is None
    rates = StepRates()
    for _ in range(20):
        rates.observe(10, 0.1)
    seconds = [views(driver, rates)[name].seconds_to_end for name in "abc"]
    assert all(value is not None for value in seconds)
    assert seconds == sorted(seconds)  # type: ignore[type-var]
    assert seconds[0] < seconds[2]  # type: ignore[operator]
