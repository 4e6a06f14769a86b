"""Growing and shrinking the KV pool while requests run. Engine thread, between two steps."""

from __future__ import annotations

from dataclasses import dataclass

from cb_backend.core.scheduler import Scheduler
from cb_backend.core.step_io import BlockCopy, CopyKind, PoolResize
from cb_backend.errors import InternalError, InvalidRequestError


def resize_pool(scheduler: Scheduler, num_blocks: int, *, fewest: int) -> PoolResize:
    """Bring the scheduler's books to `num_blocks`; the executor must follow before the next step.

    Requests that no longer fit are preempted, the last in order first; what is evicted goes to the
    host tier. No step may be in flight: its table has blocks that would move. Raises
    InvalidRequestError below `fewest`, what the longest request needs.
    """
    if scheduler.plans_in_flight:
        raise InternalError("the KV pool is resized between steps, and one is in flight")
    if num_blocks < fewest:
        raise InvalidRequestError(
            f"num_kv_blocks must be at least {fewest}, which a request of max_model_len tokens"
            f" needs; got {num_blocks}",
            field="num_kv_blocks",
        )
    blocks = scheduler.blocks
    while blocks.pool.num_in_use > num_blocks:
        if not blocks.pins.drop_oldest():
            scheduler.planner.preempt_last()
    moved = blocks.pool.resize(num_blocks)
    blocks.prefix_cache.rename(moved)
    for table in [*(r.block_table for r in scheduler.running.values()), *blocks.pins.block_tables]:
        table[:] = [moved.get(block_id, block_id) for block_id in table]
    # First what was evicted goes out, then the rest moves together.
    copies, blocks.copies = blocks.copies, []
    copies += [BlockCopy(CopyKind.FORK, source, target) for source, target in moved.items()]
    return PoolResize(num_blocks, tuple(copies), moved)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPolicy:
    """How many blocks the pool shall have, given the memory that is free on the device.

    Shrinks at once when a neighbour has taken what was to stay free, and grows back slowly, a
    sixteenth at a time, only while twice that remains: so two engines do not push each other to
    and fro.
    """

    min_free_bytes: int  # to stay free for neighbours
    fewest: int  # blocks
    most: int  # blocks
    bytes_per_block: int

    def choose(self, num_blocks: int, free_bytes: int) -> int:
        share = max(self.most // 16, 1)
        missing = self.min_free_bytes - free_bytes
        if missing > 0:
            shares = -(-missing // (share * self.bytes_per_block))
            return max(num_blocks - shares * share, min(self.fewest, num_blocks))
        if -missing >= 2 * share * self.bytes_per_block:
            return min(num_blocks + share, self.most)
        return num_blocks
