from __future__ import annotations

import pytest

from cb_backend.core.host_tier import HostTier
from cb_backend.core.step_io import CopyKind
from cb_backend.errors import ErrorInfo
from tests.core.driver import Driver, make_limits
from tests.fakes import make_request, next_by_hashing, solo_output


def test_the_least_recently_used_block_is_overwritten_first() -> None:
    tier = HostTier(2)
    first = tier.put(b"a")
    second = tier.put(b"b")
    tier.touch(b"a")
    assert tier.put(b"c") == second
    assert b"a" in tier
    assert b"b" not in tier
    assert tier.find(b"a") == first


def test_a_pinned_block_is_not_overwritten() -> None:
    tier = HostTier(1)
    tier.put(b"a")
    tier.pinned = frozenset([b"a"])
    assert tier.put(b"b") is None
    assert b"a" in tier


def test_without_blocks_nothing_is_kept() -> None:
    assert HostTier(0).put(b"a") is None


def test_a_block_whose_copy_failed_is_free_again() -> None:
    tier = HostTier(1)
    block = tier.put(b"a")
    assert block is not None
    tier.discard({block})
    assert b"a" not in tier
    assert tier.put(b"b") == block
    with pytest.raises(KeyError):
        tier.touch(b"a")


def test_an_evicted_prefix_comes_back_from_the_host_instead_of_being_computed() -> None:
    driver = Driver(make_limits(num_blocks=6, block_size=4, num_host_blocks=8))
    driver.add(make_request("first", range(16), max_tokens=2))
    driver.run()
    driver.add(make_request("crowd", range(100, 120), max_tokens=2))
    driver.run()
    driver.add(make_request("again", range(16), max_tokens=2))
    plan = driver.step()
    kinds = [copy.kind for copy in plan.copies]
    assert CopyKind.IN in kinds
    driver.run()
    assert driver.cached["again"] == 12
    assert driver.output["again"] == driver.output["first"]


def test_a_preempted_request_is_swapped_in_again() -> None:
    driver = Driver(make_limits(num_blocks=10, block_size=4, num_host_blocks=20))
    driver.add(make_request("a", range(8), max_tokens=24))
    driver.add(make_request("b", range(50, 58), max_tokens=24))
    driver.run()
    resumed = [
        admission
        for plan in driver.executor.plans
        for admission in plan.admitted
        if len(admission.token_ids) > admission.num_prompt_tokens
    ]
    assert driver.scheduler.planner.num_preemptions > 0
    assert all(len(a.token_ids) - a.num_computed_tokens <= 4 for a in resumed)
    assert any(copy.kind is CopyKind.IN for plan in driver.executor.plans for copy in plan.copies)
    assert driver.output["b"] == solo_output(range(50, 58), 24, next_by_hashing)


def test_what_a_failed_step_should_have_copied_out_is_not_believed() -> None:
    driver = Driver(make_limits(num_blocks=4, block_size=4, num_host_blocks=8))
    driver.add(make_request("first", range(12), max_tokens=1))
    driver.run()
    driver.add(make_request("crowd", range(100, 112), max_tokens=1))
    plan = driver.scheduler.schedule()
    assert [copy.kind for copy in plan.copies] == [CopyKind.OUT] * len(plan.copies)
    assert plan.copies
    driver.take(driver.scheduler.fail(plan, ErrorInfo("request_failed", "x"), now=0.0))
    assert len(driver.scheduler.blocks.host) == 0
