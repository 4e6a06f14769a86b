"""Gives requests their KV blocks and takes them back. Engine thread only.

Brings together the pool, the prefix cache and the host tier, and writes down which blocks the
next step must copy before it computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cb_backend.core.block_pool import BlockPool
from cb_backend.core.host_tier import HostTier
from cb_backend.core.prefix_cache import PrefixCache, extend_block_hashes
from cb_backend.core.prefix_pins import PrefixPins
from cb_backend.core.request import Request
from cb_backend.core.scheduler_limits import SchedulerLimits
from cb_backend.core.step_io import BlockCopy, CopyKind

HOLE = -1  # stands in a table for a block that was given up


def owned(block_table: list[int]) -> list[int]:
    """The blocks of a table, without its holes."""
    return [block_id for block_id in block_table if block_id != HOLE]


@dataclass(frozen=True, slots=True)
class Found:
    """What of a request's tokens is computed already, from the first token on."""

    shared: list[int]  # device blocks to share
    swapped: list[int]  # host blocks that follow them, to copy in
    forked: int | None  # a device block that follows them, to copy: only its head is wanted
    num_tokens: int  # that all of these cover


class KVBlocks:
    """The block tables of all running requests, and where their contents come from."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self.block_size = limits.block_size
        self.pool = BlockPool(limits.num_blocks)
        self.prefix_cache = PrefixCache(self.pool, on_evict=self._swap_out)
        self.host = HostTier(limits.num_host_blocks)
        self.pins = PrefixPins(self.pool, self.prefix_cache)
        self._swap_costs = limits.swap_costs
        self._window = limits.window
        self._enable_prefix_caching = limits.enable_prefix_caching
        self.step_seconds = 0.0  # of all steps that are over
        self.copies: list[BlockCopy] = []  # before the next step computes, in this order

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def missing(self, request: Request, num_tokens: int) -> int:
        """Blocks that the table lacks to cover the first `num_tokens` tokens."""
        num_held = len(request.block_table)
        if num_tokens <= num_held * self.block_size:
            return 0
        return self.blocks_for(num_tokens) - num_held

    def find(self, request: Request, parent: Request | None) -> Found:
        """The longest computed beginning: the running parent's of a fork, or the cache's."""
        if self._enable_prefix_caching:
            _extend_hashes(request, self.block_size)
        if parent is not None and (fork := self._find_fork(request, parent)) is not None:
            return fork
        # The last token must be computed even if its block is known: its logits are wanted.
        digests = request.block_hashes[: (request.num_tokens - 1) // self.block_size]
        shared = self.prefix_cache.match(digests)
        swapped = []
        for digest in digests[len(shared) :]:
            if digest not in self.host:
                break
            swapped.append(self.host.find(digest))
        if not self._swap_costs.copying_pays(len(swapped), self.block_size):
            swapped = []
        num_tokens = (len(shared) + len(swapped)) * self.block_size
        return Found(shared, swapped, None, num_tokens)

    def num_taken(self, request: Request, found: Found) -> int:
        """Available blocks that it takes to hold all known tokens, given what was found."""
        from_idle = sum(self.pool.is_idle(block_id) for block_id in owned(found.shared))
        return self.blocks_for(request.num_tokens) - len(found.shared) + from_idle

    def attach(self, request: Request, found: Found) -> None:
        """Begin the request's table with what was found. There must be room for the copies."""
        self.pool.share(owned(found.shared))
        request.block_table = list(found.shared)
        request.num_indexed_blocks = len(found.shared)
        request.num_computed_tokens = found.num_tokens
        # Each allocation may evict a block into the host tier; it must not land on one that is
        # about to be read. Copies run in the order in which they are written down.
        self.host.pinned = frozenset(request.block_hashes) if found.swapped else frozenset()
        for digest in request.block_hashes[len(found.shared) :][: len(found.swapped)]:
            self.host.touch(digest)
        for host_block in found.swapped:
            self._append_copy(request, CopyKind.IN, host_block)
        self.host.pinned = frozenset()
        if found.forked is not None:
            self._append_copy(request, CopyKind.FORK, found.forked)

    def grow(self, request: Request, num_tokens: int) -> int:
        """Make the table cover the first `num_tokens` tokens; returns the blocks that it took."""
        request.charge(self.step_seconds)
        missing = self.missing(request, num_tokens)
        request.block_table += self.pool.allocate(missing)
        return missing

    def grow_each(self, requests: Sequence[Request]) -> list[int]:
        """One block more for each, in this order; returns them. As `grow` does for one."""
        block_ids = self.pool.allocate(len(requests))
        for request, block_id in zip(requests, block_ids, strict=True):
            request.charge(self.step_seconds)
            request.block_table.append(block_id)
        return block_ids

    def release(self, request: Request) -> None:
        request.charge(self.step_seconds)
        request.charged_until = None
        self.pool.release(owned(request.block_table))
        request.block_table = []
        request.num_indexed_blocks = 0

    def index_full(self, request: Request, num_computed: int) -> None:
        """Make every block findable that is full of tokens which are known and whose step is over:
        one that is in flight may yet fail."""
        if not self._enable_prefix_caching:
            return
        num_full = num_computed // self.block_size
        if num_full > request.num_indexed_blocks:
            hashes, table = request.block_hashes, request.block_table
            _extend_hashes(request, self.block_size)
            for index in range(request.num_indexed_blocks, num_full):
                self.prefix_cache.insert(hashes[index], table[index])
            request.num_indexed_blocks = num_full

    def release_outside_window(self, request: Request, num_computed: int) -> None:
        """Give up the blocks that no token after the first `num_computed` can see. Their places in
        the table become holes: the executor's table keeps its numbers, which it must not read."""
        num_unseen = self._num_unseen(num_computed)
        unseen = request.block_table[:num_unseen]
        if unseen and unseen[-1] != HOLE:
            self.pool.release(owned(unseen))
            request.block_table[:num_unseen] = [HOLE] * num_unseen

    def _append_copy(self, request: Request, kind: CopyKind, source: int) -> None:
        (block_id,) = self.pool.allocate(1)
        self.copies.append(BlockCopy(kind, source, block_id))
        request.block_table.append(block_id)

    def _swap_out(self, block_id: int, digest: bytes) -> None:
        if digest not in self.host and (host_block := self.host.put(digest)) is not None:
            self.copies.append(BlockCopy(CopyKind.OUT, block_id, host_block))

    def _find_fork(self, request: Request, parent: Request) -> Found | None:
        # The last prompt token is computed again by each choice, which wants logits of its own.
        num_tokens = request.num_prompt_tokens - 1
        num_full = num_tokens // self.block_size
        if HOLE in parent.block_table[self._num_unseen(num_tokens) : num_full + 1]:
            return None  # the parent has moved on, and given up what the fork must still see
        forked = parent.block_table[num_full] if num_tokens % self.block_size else None
        return Found(parent.block_table[:num_full], [], forked, num_tokens)

    def _num_unseen(self, num_computed: int) -> int:
        """Leading blocks that no token from `num_computed` on can see."""
        if self._window is None:
            return 0
        return max(num_computed - self._window + 1, 0) // self.block_size


def _extend_hashes(request: Request, block_size: int) -> None:
    extend_block_hashes(
        request.block_hashes, request.token_ids, block_size=block_size, salt=request.cache_salt
    )
