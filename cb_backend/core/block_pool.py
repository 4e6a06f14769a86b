"""Who owns which KV block. Engine thread only; knows block numbers, never their contents.

A block is in exactly one of three states: free (no owner, nothing worth keeping), idle (no owner,
but the prefix cache knows its contents), or in use (one owner or more).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence

from cb_backend.errors import InternalError, OutOfBlocksError


class BlockPool:
    """Reference-counted blocks 0..num_blocks-1; idle ones are evicted least recently used first."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.ref_counts = [0] * num_blocks
        self._free = deque(range(num_blocks))
        self._idle: OrderedDict[int, None] = OrderedDict()  # least recently released first
        self._cached: set[int] = set()  # idle or in use, known to the prefix cache
        self._on_evict: Callable[[int], None] = lambda block_id: None

    def set_evict_callback(self, on_evict: Callable[[int], None]) -> None:
        """`on_evict(block_id)` is called before a block's cached contents may be overwritten."""
        self._on_evict = on_evict

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can hand out now: free and idle ones."""
        return len(self._free) + len(self._idle)

    @property
    def num_in_use(self) -> int:
        return self.num_blocks - self.num_available

    @property
    def free_blocks(self) -> Sequence[int]:
        return tuple(self._free)

    @property
    def idle_blocks(self) -> Sequence[int]:
        return tuple(self._idle)

    @property
    def cached_blocks(self) -> frozenset[int]:
        return frozenset(self._cached)

    def is_idle(self, block_id: int) -> bool:
        return block_id in self._idle

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one owner each. Raises OutOfBlocksError: ask first."""
        if count > self.num_available:
            raise OutOfBlocksError(
                f"{count} KV blocks wanted, {self.num_available} of {self.num_blocks} available"
            )
        free, ref_counts = self._free, self.ref_counts
        block_ids = [free.popleft() if free else self._evict_oldest() for _ in range(count)]
        for block_id in block_ids:
            ref_counts[block_id] = 1
        return block_ids

    def share(self, block_ids: Iterable[int]) -> None:
        """One more owner for each of these cached blocks."""
        for block_id in block_ids:
            if self.ref_counts[block_id] == 0:
                if block_id not in self._idle:
                    raise InternalError(f"block {block_id} is free and cannot be shared")
                del self._idle[block_id]
            self.ref_counts[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """One owner less for each. A cached block without owners stays as idle."""
        # Tail first: the head of a sequence is the part another request may share, so it must
        # be the last to be evicted.
        for block_id in reversed(block_ids):
            if self.ref_counts[block_id] == 0:
                raise InternalError(f"block {block_id} has no owner to release it")
            self.ref_counts[block_id] -= 1
            if self.ref_counts[block_id] == 0:
                if block_id in self._cached:
                    self._idle[block_id] = None
                else:
                    self._free.append(block_id)

    def mark_cached(self, block_id: int) -> None:
        """The prefix cache now knows this block, which is in use."""
        if self.ref_counts[block_id] == 0:
            raise InternalError(f"block {block_id} is not in use and cannot be cached")
        self._cached.add(block_id)

    def resize(self, num_blocks: int) -> dict[int, int]:
        """Change the number of blocks, evicting idle ones as needed; returns which moved where.

        Never fewer than are in use: ask `num_in_use` first.
        """
        if num_blocks < self.num_in_use:
            raise OutOfBlocksError(f"{self.num_in_use} blocks are in use, {num_blocks} wanted")
        while self.num_in_use + len(self._idle) > num_blocks:
            self._free.append(self._evict_oldest())
        held = [*self._idle, *(b for b, count in enumerate(self.ref_counts) if count)]
        self._free = deque(sorted(set(range(num_blocks)) - set(held)))
        moved = {block_id: self._free.popleft() for block_id in held if block_id >= num_blocks}
        counts = [0] * num_blocks
        for block_id in held:
            counts[moved.get(block_id, block_id)] = self.ref_counts[block_id]
        self.ref_counts, self.num_blocks = counts, num_blocks
        self._idle = OrderedDict((moved.get(block_id, block_id), None) for block_id in self._idle)
        self._cached = {moved.get(block_id, block_id) for block_id in self._cached}
        return moved

    def _evict_oldest(self) -> int:
        block_id, _ = self._idle.popitem(last=False)
        self._cached.discard(block_id)
        self._on_evict(block_id)
        return block_id
