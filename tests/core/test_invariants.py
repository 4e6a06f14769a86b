"""Each invariant fires on a fault planted for it; a check that cannot fail is no check."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from cb_backend.core.invariants import (
    PLAN_INVARIANTS,
    SCHEDULER_INVARIANTS,
    check_plan,
    check_scheduler,
)
from cb_backend.core.request import RequestStatus
from cb_backend.core.scheduler import Scheduler
from cb_backend.core.step_io import StepPlan, StepRows
from cb_backend.errors import InvariantError
from tests.core.driver import Driver, make_limits
from tests.fakes import make_request


def busy_driver() -> Driver:
    """Two run, sharing a prefix; one waits; some blocks are idle."""
    driver = Driver(make_limits(max_num_seqs=2))
    driver.add(make_request("gone", [*range(8), 1, 2, 3, 4, 5], max_tokens=1))
    driver.run()
    driver.add(
        make_request("a", [*range(8), 50], max_tokens=20),
        make_request("b", [*range(8), 60], max_tokens=20),
        make_request("c", [9], max_tokens=20),
    )
    driver.step()
    driver.step()
    assert list(driver.scheduler.running) == ["a", "b"]
    assert driver.scheduler.blocks.pool.idle_blocks
    return driver


def lose_a_free_block(scheduler: Scheduler) -> None:
    scheduler.blocks.pool._free.pop()


def free_a_block_in_use(scheduler: Scheduler) -> None:
    scheduler.blocks.pool._free.append(scheduler.running["a"].block_table[-1])


def forget_a_release(scheduler: Scheduler) -> None:
    scheduler.blocks.pool.ref_counts[scheduler.running["a"].block_table[0]] += 1


def leave_blocks_with_a_waiting_request(scheduler: Scheduler) -> None:
    next(iter(scheduler.waiting)).num_computed_tokens = 1


def leave_blocks_in_use_by_nobody(scheduler: Scheduler) -> None:
    scheduler.running.clear()


def put_a_request_in_two_places(scheduler: Scheduler) -> None:
    scheduler.waiting.push(scheduler.running["a"])


def keep_a_finished_request(scheduler: Scheduler) -> None:
    scheduler.running["a"].status = RequestStatus.FINISHED


def serve_the_last_first(scheduler: Scheduler) -> None:
    scheduler.roster._order.reverse()


def forget_one_in_the_order(scheduler: Scheduler) -> None:
    scheduler.roster._order.pop()


def compute_past_the_table(scheduler: Scheduler) -> None:
    scheduler.running["a"].num_computed_tokens = 99


def compute_what_nobody_samples(scheduler: Scheduler) -> None:
    scheduler.running["a"].num_computed_tokens += 2  # the place is there, the token is not


def let_one_that_waits_grow(scheduler: Scheduler) -> None:
    next(iter(scheduler.waiting)).token_ids.append(1)


def generate_past_max_tokens(scheduler: Scheduler) -> None:
    scheduler.running["a"].max_tokens = 1


def index_a_free_block(scheduler: Scheduler) -> None:
    scheduler.blocks.prefix_cache._digest_of[scheduler.blocks.pool.free_blocks[0]] = b"x"


def index_a_block_under_a_wrong_digest(scheduler: Scheduler) -> None:
    block_id = scheduler.running["a"].block_table[0]
    scheduler.blocks.prefix_cache._digest_of[block_id] = b"x"


SCHEDULER_FAULTS: list[tuple[str, Callable[[Scheduler], None]]] = [
    ("every_block_has_one_state", lose_a_free_block),
    ("every_block_has_one_state", free_a_block_in_use),
    ("ref_counts_equal_owners", forget_a_release),
    ("only_running_requests_own_blocks", leave_blocks_with_a_waiting_request),
    ("only_running_requests_own_blocks", leave_blocks_in_use_by_nobody),
    ("every_request_has_one_home", put_a_request_in_two_places),
    ("every_request_has_one_home", keep_a_finished_request),
    ("running_follow_the_policy", serve_the_last_first),
    ("running_follow_the_policy", forget_one_in_the_order),
    ("counts_are_ordered", compute_past_the_table),
    ("counts_are_ordered", compute_what_nobody_samples),
    ("counts_are_ordered", let_one_that_waits_grow),
    ("counts_are_ordered", generate_past_max_tokens),
    ("cache_index_matches_pool", index_a_free_block),
    ("cache_index_matches_pool", index_a_block_under_a_wrong_digest),
]


@pytest.mark.parametrize(
    ("name", "fault"), SCHEDULER_FAULTS, ids=lambda v: getattr(v, "__name__", v)
)
def test_the_check_fires_on_its_fault(name: str, fault: Callable[[Scheduler], None]) -> None:
    scheduler = busy_driver().scheduler
    check = next(check for check in SCHEDULER_INVARIANTS if check.__name__ == name)
    check(scheduler)
    fault(scheduler)
    with pytest.raises(InvariantError, match=f"^{name}:"):
        check(scheduler)
    with pytest.raises(InvariantError):
        check_scheduler(scheduler)


def test_seats_taken_twice_are_seen() -> None:
    scheduler = busy_driver().scheduler
    scheduler.limits = replace(scheduler.limits, max_num_seqs=1)
    with pytest.raises(InvariantError, match="2 run, max_num_seqs is 1"):
        check_scheduler(scheduler)


def over_budget(scheduler: Scheduler, plan: StepPlan) -> StepPlan:
    rows = (row._replace(num_scheduled_tokens=30) for row in plan.rows)
    return replace(plan, rows=StepRows.of(*rows))


def nothing_scheduled(scheduler: Scheduler, plan: StepPlan) -> StepPlan:
    return replace(plan, rows=StepRows())


def one_left_out(scheduler: Scheduler, plan: StepPlan) -> StepPlan:
    return replace(plan, rows=StepRows.of(next(iter(plan.rows))))


def writes_a_shared_block(scheduler: Scheduler, plan: StepPlan) -> StepPlan:
    first, *others = plan.rows
    return replace(plan, rows=StepRows.of(first._replace(num_computed_tokens=0), *others))


def table_too_short(scheduler: Scheduler, plan: StepPlan) -> StepPlan:
    scheduler.running["a"].block_table.pop()
    return plan


PLAN_FAULTS = [
    ("budget_is_kept", over_budget),
    ("work_makes_progress", nothing_scheduled),
    ("work_makes_progress", one_left_out),
    ("written_slots_are_private", writes_a_shared_block),
    ("written_slots_are_private", table_too_short),
]


@pytest.mark.parametrize(("name", "fault"), PLAN_FAULTS, ids=lambda v: getattr(v, "__name__", v))
def test_the_plan_check_fires_on_its_fault(
    name: str, fault: Callable[[Scheduler, StepPlan], StepPlan]
) -> None:
    scheduler = busy_driver().scheduler
    plan = scheduler.schedule()
    check = next(check for check in PLAN_INVARIANTS if check.__name__ == name)
    check(scheduler, plan)
    broken = fault(scheduler, plan)
    with pytest.raises(InvariantError, match=f"^{name}:"):
        check(scheduler, broken)
    with pytest.raises(InvariantError):
        check_plan(scheduler, broken)


def test_every_check_has_a_fault_that_makes_it_fire() -> None:
    planted = {name for name, _ in [*SCHEDULER_FAULTS, *PLAN_FAULTS]}
    assert planted == {check.__name__ for check in (*SCHEDULER_INVARIANTS, *PLAN_INVARIANTS)}
