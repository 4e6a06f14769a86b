"""A pinned prefix outlives its request and its rivals, but never stands in a request's way."""

from __future__ import annotations

import pytest

from tests.core.driver import Driver, make_limits
from tests.fakes import make_request, next_by_hashing, solo_output


def fill_pool(driver: Driver, times: int = 3) -> None:
    for number in range(times):
        prompt = range(100 * number + 100, 100 * number + 112)
        driver.add(make_request(f"crowd{number}", prompt, max_tokens=2))
        driver.run()


@pytest.mark.parametrize(("pin_s", "cached"), [(0.0, 0), (1000.0, 8)])
def test_a_pinned_prompt_survives_a_crowd_that_evicts_others(pin_s: float, cached: int) -> None:
    driver = Driver(make_limits(num_blocks=6, block_size=4))
    driver.add(make_request("kept", range(9), max_tokens=1, pin_s=pin_s))
    driver.run()
    fill_pool(driver)
    driver.add(make_request("again", range(9), max_tokens=1))
    driver.run()
    assert driver.cached["again"] == cached


def test_of_a_prompt_computed_twice_at_once_the_copy_that_can_be_found_is_pinned() -> None:
    driver = Driver(make_limits(num_blocks=12, block_size=4))
    driver.add(make_request("twin", range(9), max_tokens=1))
    driver.add(make_request("kept", range(9), max_tokens=1, pin_s=1000.0))
    driver.run()
    fill_pool(driver, 5)
    driver.add(make_request("again", range(9), max_tokens=1))
    driver.run()
    assert driver.cached["again"] == 8
    assert driver.scheduler.blocks.pool.num_in_use == 2


def test_a_pin_ends_with_its_time() -> None:
    driver = Driver(make_limits(num_blocks=6, block_size=4))
    driver.add(make_request("kept", range(9), max_tokens=1, pin_s=3.0))  # the clock counts steps
    driver.run()
    assert driver.scheduler.blocks.pool.num_in_use == 2
    fill_pool(driver)
    assert driver.scheduler.blocks.pool.num_in_use == 0


def test_pinning_again_moves_the_end() -> None:
    driver = Driver(make_limits(num_blocks=16, block_size=4))
    for pin_s in (2.0, 50.0):
        driver.add(make_request(f"p{pin_s}", range(9), max_tokens=1, pin_s=pin_s))
        driver.run()
    fill_pool(driver)
    assert driver.scheduler.blocks.pool.num_in_use == 2


def test_pins_hold_at_most_half_of_the_pool_and_the_oldest_goes_first() -> None:
    driver = Driver(make_limits(num_blocks=8, block_size=4))
    for number in range(4):
        prompt = range(100 * number, 100 * number + 9)
        driver.add(make_request(f"p{number}", prompt, max_tokens=1, pin_s=1e9))
        driver.run()
    assert driver.scheduler.blocks.pool.num_in_use == 4
    driver.add(make_request("oldest", range(9), max_tokens=1))
    driver.add(make_request("newest", range(300, 309), max_tokens=1))
    driver.step()
    assert driver.scheduler.blocks.pins.block_tables
    driver.run()
    assert driver.cached["newest"] == 8


@pytest.mark.parametrize("length", [1, 20, 26])
def test_a_request_that_needs_the_whole_pool_takes_it_from_the_pins(length: int) -> None:
    driver = Driver(make_limits(num_blocks=8, block_size=4))
    for number in range(2):
        prompt = range(100 * number, 100 * number + 9)
        driver.add(make_request(f"p{number}", prompt, max_tokens=1, pin_s=1e9))
        driver.run()
    driver.add(make_request("big", range(50, 50 + length), max_tokens=32 - length))
    driver.run()
    expected = solo_output(range(50, 50 + length), 32 - length, next_by_hashing)
    assert driver.output["big"] == expected
    assert driver.scheduler.planner.num_preemptions == 0


def test_without_a_prefix_cache_nothing_is_pinned() -> None:
    driver = Driver(make_limits(enable_prefix_caching=False))
    driver.add(make_request("a", range(9), max_tokens=1, pin_s=1e9))
    driver.run()
    assert driver.scheduler.blocks.pool.num_in_use == 0
