"""Blocks that fell out of every attention window are given up, and nobody misses them."""

from __future__ import annotations

import pytest

from cb_backend.core.kv_blocks import HOLE, owned
from tests.core.driver import Driver, make_limits
from tests.fakes import make_request, next_by_hashing, solo_output


@pytest.mark.parametrize("window", [1, 4, 5, 9])
def test_a_long_request_holds_no_more_blocks_than_its_window_spans(window: int) -> None:
    driver = Driver(make_limits(block_size=4, window=window))
    driver.add(make_request("a", range(6), max_tokens=60))
    most = 0
    for _ in range(50):
        driver.step()
        most = max(most, len(owned(driver.scheduler.running["a"].block_table)))
    assert most <= (window - 2) // 4 + 3
    driver.run()
    assert driver.output["a"] == solo_output(range(6), 60, next_by_hashing, window)


def test_without_a_window_nothing_is_given_up() -> None:
    driver = Driver(make_limits(block_size=4))
    driver.add(make_request("a", range(6), max_tokens=60))
    for _ in range(50):
        driver.step()
    assert HOLE not in driver.scheduler.running["a"].block_table


def test_given_up_blocks_serve_others_at_once() -> None:
    driver = Driver(make_limits(num_blocks=18, block_size=4, window=8, enable_prefix_caching=False))
    for name, start in (("a", 0), ("b", 50), ("c", 90)):
        driver.add(make_request(name, range(start, start + 6), max_tokens=60))
    driver.run()
    assert driver.scheduler.planner.num_preemptions == 0, "three such fit only with holes"
    for name, start in (("a", 0), ("b", 50), ("c", 90)):
        expected = solo_output(range(start, start + 6), 60, next_by_hashing, 8)
        assert driver.output[name] == expected


def test_a_fork_that_comes_late_is_computed_where_its_parent_has_moved_on() -> None:
    driver = Driver(make_limits(block_size=4, window=5, max_num_seqs=1))
    driver.add(make_request("p", range(10), max_tokens=30))
    driver.add(make_request("p.1", range(10), max_tokens=30, fork_of="p"))
    driver.run()
    assert driver.output["p.1"] == solo_output(range(10), 30, next_by_hashing, 5)
