"""Prefixes that are kept for a time, used or not. Engine thread only.

A pin is one more owner of its blocks, so nothing evicts them. Pins give way, oldest first, when a
request could otherwise not run at all, and when together they would hold more than their share.
"""

from __future__ import annotations

from collections import OrderedDict

from cb_backend.core.block_pool import BlockPool
from cb_backend.core.prefix_cache import PrefixCache
from cb_backend.core.request import Request

MOST_OF_POOL = 0.5


class PrefixPins:
    """One pin per digest of a prefix; pinning it again moves its end."""

    def __init__(self, pool: BlockPool, prefix_cache: PrefixCache) -> None:
        self._pool = pool
        self._prefix_cache = prefix_cache
        self._pins: OrderedDict[bytes, tuple[list[int], float]] = OrderedDict()  # oldest first

    @property
    def block_tables(self) -> list[list[int]]:
        return [block_ids for block_ids, _ in self._pins.values()]

    def pin_prompt(self, request: Request, block_size: int, until: float) -> None:
        """Keep the full blocks of its prompt, which is computed, whoever uses them."""
        digests = request.block_hashes[: request.num_prompt_tokens // block_size]
        # Not its own table: of blocks with equal contents only the first can be found again.
        block_ids = self._prefix_cache.match(digests)
        if digests and len(block_ids) == len(digests):
            self.pin(digests[-1], block_ids, until)

    def pin(self, digest: bytes, block_ids: list[int], until: float) -> None:
        """Keep these blocks, which are in use or cached, until the clock says `until`."""
        if digest in self._pins:
            kept, ends = self._pins.pop(digest)
            self._pins[digest] = (kept, max(ends, until))
            return
        self._pool.share(block_ids)
        self._pins[digest] = (block_ids, until)
        while self._num_blocks() > self._pool.num_blocks * MOST_OF_POOL:
            self.drop_oldest()

    def expire(self, now: float) -> None:
        for digest in [digest for digest, (_, until) in self._pins.items() if until <= now]:
            self._pool.release(self._pins.pop(digest)[0])

    def drop_oldest(self) -> bool:
        """Let one go before its time; False if there is none."""
        if not self._pins:
            return False
        _, (block_ids, _) = self._pins.popitem(last=False)
        self._pool.release(block_ids)
        return True

    def _num_blocks(self) -> int:
        return len({block_id for block_ids, _ in self._pins.values() for block_id in block_ids})
