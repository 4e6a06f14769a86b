"""What must always be true of the scheduler, as named checks. Engine thread only.

They run after every step in tests and under `check_invariants`, else whenever the engine falls
idle and after a failed step. Each raises InvariantError that begins with its own name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from cb_backend.core.kv_blocks import owned
from cb_backend.core.request import Request, RequestStatus
from cb_backend.core.scheduler import Scheduler
from cb_backend.core.step_io import StepPlan
from cb_backend.errors import InvariantError


def every_block_has_one_state(scheduler: Scheduler) -> None:
    """free + idle + in use = all blocks, disjoint."""
    pool = scheduler.blocks.pool
    free, idle = pool.free_blocks, pool.idle_blocks
    in_use = [block_id for block_id, count in enumerate(pool.ref_counts) if count > 0]
    everything = Counter([*free, *idle, *in_use])
    if everything != Counter(range(pool.num_blocks)):
        odd = {block_id: n for block_id, n in everything.items() if n != 1}
        lost = set(range(pool.num_blocks)) - set(everything)
        raise InvariantError(f"every_block_has_one_state: counted {odd} times, lost {lost}")


def ref_counts_equal_owners(scheduler: Scheduler) -> None:
    """The stored count of each block is the number of tables, and of pins, that have it."""
    tables = [owned(request.block_table) for request in scheduler.running.values()]
    owners = Counter(b for table in [*tables, *scheduler.blocks.pins.block_tables] for b in table)
    for block_id, count in enumerate(scheduler.blocks.pool.ref_counts):
        if owners[block_id] != count:
            raise InvariantError(
                f"ref_counts_equal_owners: block {block_id} has {owners[block_id]} owners,"
                f" ref_count {count}"
            )


def only_running_requests_own_blocks(scheduler: Scheduler) -> None:
    for request in scheduler.waiting:
        if request.block_table or request.num_computed_tokens:
            raise InvariantError(f"only_running_requests_own_blocks: {request!r} waits")
    pinned = {b for block_table in scheduler.blocks.pins.block_tables for b in block_table}
    if not scheduler.running and scheduler.blocks.pool.num_in_use != len(pinned):
        raise InvariantError(
            f"only_running_requests_own_blocks: {scheduler.blocks.pool.num_in_use} in use,"
            f" {len(pinned)} pinned"
        )


def every_request_has_one_home(scheduler: Scheduler) -> None:
    both = {r for r in scheduler.running if r in scheduler.waiting}
    if both:
        raise InvariantError(f"every_request_has_one_home: {sorted(both)} run and wait")
    for request in scheduler.running.values():
        if request.status is not RequestStatus.RUNNING:
            raise InvariantError(f"every_request_has_one_home: {request!r} is among the running")
    for request in scheduler.waiting:
        if request.status not in (RequestStatus.WAITING, RequestStatus.PREEMPTED):
            raise InvariantError(f"every_request_has_one_home: {request!r} is among the waiting")
    if len(scheduler.running) > scheduler.limits.max_num_seqs:
        raise InvariantError(
            f"every_request_has_one_home: {len(scheduler.running)} run,"
            f" max_num_seqs is {scheduler.limits.max_num_seqs}"
        )


def running_follow_the_policy(scheduler: Scheduler) -> None:
    """Who runs stands in the order of the policy's keys, each once."""
    roster, in_order = scheduler.roster, scheduler.roster.in_order()
    if {r.request_id: r for r in in_order} != roster.running or len(in_order) != len(
        roster.running
    ):
        raise InvariantError("running_follow_the_policy: the order and the running differ")
    if in_order != sorted(in_order, key=lambda r: (roster.policy.key(r), r.request_id)):
        raise InvariantError(f"running_follow_the_policy: not by the keys of {roster.policy.name}")


def _shares_in_flight(scheduler: Scheduler, request: Request) -> list[int]:
    """Its tokens in each of the steps in flight."""
    rows = (row for plan in scheduler.plans_in_flight for row in plan.rows)
    return [row.num_scheduled_tokens for row in rows if row.request_id == request.request_id]


def counts_are_ordered(scheduler: Scheduler) -> None:
    """computed <= known, but for the one token that a step in flight samples for the next one;
    output <= max_tokens; the table covers what is computed; the queue knows its length."""
    if scheduler.waiting.num_tokens != sum(request.num_tokens for request in scheduler.waiting):
        raise InvariantError("counts_are_ordered: the tokens of the queue")
    for request in [*scheduler.running.values(), *scheduler.waiting]:
        covered = len(request.block_table) * scheduler.limits.block_size
        num_unknown = len(_shares_in_flight(scheduler, request)) > 1
        if request.num_computed_tokens > min(covered, request.num_tokens + num_unknown):
            raise InvariantError(f"counts_are_ordered: computed of {request!r}")
        if not 0 <= request.num_output_tokens <= request.max_tokens:
            raise InvariantError(f"counts_are_ordered: output of {request!r}")


def cache_index_matches_pool(scheduler: Scheduler) -> None:
    """The prefix cache knows exactly what the pool holds as cached, and nothing that is free or not
    yet computed."""
    indexed = scheduler.blocks.prefix_cache.indexed_blocks
    if indexed.keys() != scheduler.blocks.pool.cached_blocks or len(set(indexed.values())) != len(
        indexed
    ):
        raise InvariantError("cache_index_matches_pool: index and pool disagree")
    if free := indexed.keys() & set(scheduler.blocks.pool.free_blocks):
        raise InvariantError(f"cache_index_matches_pool: free blocks {free} are indexed")
    for request in scheduler.running.values():
        num_computed = request.num_computed_tokens - sum(_shares_in_flight(scheduler, request))
        full = num_computed // scheduler.limits.block_size
        for index, block_id in enumerate(request.block_table):
            digest = indexed.get(block_id)
            if digest is not None and (index >= full or digest != request.block_hashes[index]):
                raise InvariantError(f"cache_index_matches_pool: block {block_id} of {request!r}")


SCHEDULER_INVARIANTS: tuple[Callable[[Scheduler], None], ...] = (
    every_block_has_one_state,
    ref_counts_equal_owners,
    only_running_requests_own_blocks,
    every_request_has_one_home,
    running_follow_the_policy,
    counts_are_ordered,
    cache_index_matches_pool,
)


def budget_is_kept(scheduler: Scheduler, plan: StepPlan) -> None:
    if plan.num_tokens > scheduler.limits.max_num_batched_tokens:
        raise InvariantError(
            f"budget_is_kept: {plan.num_tokens} tokens in step {plan.step},"
            f" budget {scheduler.limits.max_num_batched_tokens}"
        )


def work_makes_progress(scheduler: Scheduler, plan: StepPlan) -> None:
    """While a request lives, a step computes something, or the step in flight does; and no running
    one is left out, but those whose last token is in flight."""
    before = [p for p in scheduler.plans_in_flight if p.step < plan.step]
    if scheduler.has_work and not plan.rows and not any(p.rows for p in before):
        raise InvariantError(f"work_makes_progress: step {plan.step} is empty, requests wait")
    rows = {row.request_id for row in plan.rows}
    missing = [
        request.request_id
        for request in scheduler.running.values()
        if request.request_id not in rows and request.num_uncomputed_tokens
    ]
    if missing:
        raise InvariantError(f"work_makes_progress: {sorted(missing)} run without a row")


def written_slots_are_private(scheduler: Scheduler, plan: StepPlan) -> None:
    """Every position this step writes lies in a block of one owner that no reader can find yet."""
    block_size = scheduler.limits.block_size
    seen: set[int] = set()
    for row in plan.rows:
        request = scheduler.running[row.request_id]
        end = row.num_computed_tokens + row.num_scheduled_tokens
        first, last = row.num_computed_tokens // block_size, (end - 1) // block_size
        if row.num_scheduled_tokens < 1 or last >= len(request.block_table):
            raise InvariantError(f"written_slots_are_private: table of {request!r} is too short")
        written = request.block_table[first : last + 1]
        for block_id in written:
            shared = scheduler.blocks.pool.ref_counts[block_id] != 1 or block_id in seen
            if shared or block_id in scheduler.blocks.pool.cached_blocks:
                raise InvariantError(f"written_slots_are_private: block {block_id} of {request!r}")
        seen.update(written)


PLAN_INVARIANTS: tuple[Callable[[Scheduler, StepPlan], None], ...] = (
    budget_is_kept,
    work_makes_progress,
    written_slots_are_private,
)


def check_scheduler(scheduler: Scheduler) -> None:
    """All checks that hold between steps. Raises InvariantError."""
    for check in SCHEDULER_INVARIANTS:
        check(scheduler)


def check_plan(scheduler: Scheduler, plan: StepPlan) -> None:
    """All checks that hold between `schedule()` and `update()`. Raises InvariantError."""
    for check in PLAN_INVARIANTS:
        check(scheduler, plan)
