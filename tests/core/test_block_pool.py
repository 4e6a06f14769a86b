from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cb_backend.core.block_pool import BlockPool
from cb_backend.errors import InternalError, OutOfBlocksError


def test_blocks_are_handed_out_once() -> None:
    pool = BlockPool(5)
    taken = pool.allocate(2) + pool.allocate(3)
    assert sorted(taken) == [0, 1, 2, 3, 4]
    assert pool.num_available == 0


def test_asking_for_more_than_there_is_raises_and_takes_nothing() -> None:
    pool = BlockPool(3)
    pool.allocate(2)
    with pytest.raises(OutOfBlocksError, match="2 KV blocks wanted, 1 of 3 available"):
        pool.allocate(2)
    assert pool.num_available == 1


def test_a_shared_block_is_free_only_after_its_last_owner_leaves() -> None:
    pool = BlockPool(1)
    blocks = pool.allocate(1)
    pool.share(blocks)
    pool.release(blocks)
    assert pool.num_available == 0
    pool.release(blocks)
    assert pool.num_available == 1


def test_a_cached_block_without_owner_is_idle_and_can_be_shared_again() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.mark_cached(blocks[0])
    pool.release(blocks)
    assert pool.is_idle(blocks[0])
    pool.share(blocks)
    assert pool.ref_counts[blocks[0]] == 1
    assert not pool.is_idle(blocks[0])


def test_free_blocks_go_before_idle_ones_and_the_least_recent_idle_before_others() -> None:
    evicted: list[int] = []
    pool = BlockPool(3)
    pool.set_evict_callback(evicted.append)
    first, second = pool.allocate(1), pool.allocate(1)
    for block_id in (*first, *second):
        pool.mark_cached(block_id)
    pool.release(second)
    pool.release(first)
    assert pool.allocate(1) == [2]
    assert not evicted
    assert pool.allocate(2) == [*second, *first]
    assert evicted == [*second, *first]


def test_the_tail_of_a_sequence_is_evicted_before_its_head() -> None:
    pool = BlockPool(3)
    table = pool.allocate(3)
    for block_id in table:
        pool.mark_cached(block_id)
    pool.release(table)
    assert pool.allocate(3) == table[::-1]


def test_releasing_or_sharing_a_free_block_is_a_bug_that_shows() -> None:
    pool = BlockPool(1)
    with pytest.raises(InternalError, match="no owner"):
        pool.release([0])
    with pytest.raises(InternalError, match="is free"):
        pool.share([0])
    with pytest.raises(InternalError, match="not in use"):
        pool.mark_cached(0)


class PoolAgainstModel(RuleBasedStateMachine):
    """The pool beside a plain list of owners: whatever the order of calls, they agree."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(7)
        self.evicted: list[int] = []
        self.pool.set_evict_callback(self.evicted.append)
        self.owners: list[list[int]] = []
        self.cached: set[int] = set()

    @rule(count=st.integers(0, 8))
    def allocate(self, count: int) -> None:
        if count > self.pool.num_available:
            with pytest.raises(OutOfBlocksError):
                self.pool.allocate(count)
            return
        self.evicted.clear()
        taken = self.pool.allocate(count)
        held = {block_id for table in self.owners for block_id in table}
        assert not held & set(taken)
        assert set(self.evicted) == self.cached & set(taken)
        self.cached -= set(taken)
        self.owners.append(taken)

    @precondition(lambda self: any(self.owners))
    @rule(data=st.data())
    def cache_and_share(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from([table for table in self.owners if table]))
        for block_id in table:
            self.pool.mark_cached(block_id)
        self.cached |= set(table)
        self.pool.share(table)
        self.owners.append(list(table))

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.owners) - 1))
        self.pool.release(self.owners.pop(index))

    @invariant()
    def counts_agree(self) -> None:
        held = [block_id for table in self.owners for block_id in table]
        assert self.pool.ref_counts == [held.count(block_id) for block_id in range(7)]
        assert self.pool.num_in_use == len(set(held))
        assert set(self.pool.idle_blocks) == self.cached - set(held)
        assert len(self.pool.free_blocks) + len(self.pool.idle_blocks) + len(set(held)) == 7


TestPoolAgainstModel = PoolAgainstModel.TestCase
TestPoolAgainstModel.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
