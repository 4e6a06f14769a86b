"""The pool changes its size under running requests, and none of them notices."""

from __future__ import annotations

import pytest

from cb_backend.core.invariants import check_scheduler
from cb_backend.core.pool_resize import MemoryPolicy, resize_pool
from cb_backend.core.step_io import CopyKind
from cb_backend.errors import InvalidRequestError
from tests.core.driver import Driver, make_limits
from tests.fakes import make_request, next_by_hashing, solo_output


def resize(driver: Driver, num_blocks: int, fewest: int = 1) -> None:
    driver.executor.resize(resize_pool(driver.scheduler, num_blocks, fewest=fewest))
    check_scheduler(driver.scheduler)


def busy_driver(num_host_blocks: int = 0) -> Driver:
    driver = Driver(make_limits(num_blocks=20, block_size=4, num_host_blocks=num_host_blocks))
    driver.add(make_request("idle", range(200, 212), max_tokens=1))
    driver.run()
    for name, start in (("a", 0), ("b", 50)):
        driver.add(make_request(name, range(start, start + 10), max_tokens=14))
    for _ in range(4):
        driver.step()
    return driver


def check_outputs(driver: Driver) -> None:
    driver.run()
    for name, start in (("a", 0), ("b", 50)):
        assert driver.output[name] == solo_output(range(start, start + 10), 14, next_by_hashing)


@pytest.mark.parametrize("num_blocks", [6, 7, 8, 9, 11, 12, 20, 21, 50])
def test_running_requests_go_on_at_any_size(num_blocks: int) -> None:
    driver = busy_driver()
    resize(driver, num_blocks)
    assert driver.scheduler.blocks.pool.num_blocks == num_blocks
    check_outputs(driver)


def test_shrinking_moves_what_lies_behind_the_new_end() -> None:
    driver = busy_driver()
    change = resize_pool(driver.scheduler, 8, fewest=1)
    assert change.moved
    assert all(old >= 8 > new for old, new in change.moved.items())
    driver.executor.resize(change)
    check_outputs(driver)


def test_shrinking_below_what_is_in_use_preempts_the_last() -> None:
    driver = busy_driver()
    resize(driver, 6)
    assert list(driver.scheduler.running) == ["a"]
    check_outputs(driver)


def test_idle_prefixes_survive_where_there_is_room_and_move_along() -> None:
    driver = busy_driver()
    resize(driver, 12)
    driver.add(make_request("again", range(200, 212), max_tokens=1))
    driver.run()
    assert driver.cached["again"] == 8


def test_what_a_shrink_evicts_goes_to_the_host() -> None:
    driver = busy_driver(num_host_blocks=8)
    change = resize_pool(driver.scheduler, 8, fewest=1)
    kinds = [copy.kind for copy in change.copies]
    assert kinds == sorted(kinds, key=[CopyKind.OUT, CopyKind.FORK].index), "out before moves"
    assert CopyKind.OUT in kinds
    driver.executor.resize(change)
    driver.run()
    driver.add(make_request("again", range(200, 212), max_tokens=1))
    driver.run()
    assert driver.cached["again"] == 8


def test_pins_give_way_to_a_shrink() -> None:
    driver = Driver(make_limits(num_blocks=20, block_size=4))
    driver.add(make_request("kept", range(21), max_tokens=1, pin_s=1e9))
    driver.run()
    resize(driver, 4)
    assert driver.scheduler.blocks.pool.num_in_use == 0


def test_a_pool_too_small_for_one_request_is_refused_and_nothing_changes() -> None:
    driver = busy_driver()
    with pytest.raises(InvalidRequestError, match=r"at least 9, .* got 8"):
        resize_pool(driver.scheduler, 8, fewest=9)
    assert driver.scheduler.blocks.pool.num_blocks == 20
    check_outputs(driver)


class TestMemoryPolicy:
    policy = MemoryPolicy(min_free_bytes=1000, fewest=10, most=160, bytes_per_block=10)

    @pytest.mark.parametrize(
        ("num_blocks", "free", "wanted"),
        [
            (160, 1000, 160),  # enough is free
            (160, 999, 150),  # a neighbour came: one share of ten blocks
            (160, 850, 140),  # two shares
            (160, 0, 60),
            (60, 0, 10),  # never below what one request needs
            (10, 0, 10),
            (100, 1150, 100),  # not enough to take back without coming near the limit
            (100, 1200, 110),
            (155, 5000, 160),  # never above what it had at first
        ],
    )
    def test_it_gives_at_once_and_takes_back_slowly(
        self, num_blocks: int, free: int, wanted: int
    ) -> None:
        assert self.policy.choose(num_blocks, free) == wanted

    def test_two_engines_do_not_push_each_other_to_and_fro(self) -> None:
        sizes, total = [160, 160], 2600  # bytes for both; each wants to leave 1000 free
        history = []
        for turn in range(60):
            free = total - 10 * sum(sizes)
            sizes[turn % 2] = self.policy.choose(sizes[turn % 2], free)
            history.append(tuple(sizes))
        assert len(set(history[30:])) == 1
        assert total - 10 * sum(sizes) >= 1000
