"""Which KV blocks lie in host memory. Engine thread only; knows numbers, never contents.

The second level of the prefix cache: a full block whose device copy is evicted goes on living
here, so that a preempted request, or a prompt that comes again, copies instead of computing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection


class HostTier:
    """Host blocks 0..num_blocks-1 by digest; the least recently used one is overwritten first."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.pinned: frozenset[bytes] = frozenset()  # must not be overwritten now
        self._block_of: OrderedDict[bytes, int] = OrderedDict()
        self._free = list(reversed(range(num_blocks)))

    def __len__(self) -> int:
        return len(self._block_of)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._block_of

    @property
    def blocks(self) -> dict[bytes, int]:
        """Digest to host block, least recently used first."""
        return dict(self._block_of)

    def put(self, digest: bytes) -> int | None:
        """The host block that `digest` shall be copied to; None when there is none to overwrite."""
        if self._free:
            block = self._free.pop()
        elif self._block_of and next(iter(self._block_of)) not in self.pinned:
            block = self._block_of.popitem(last=False)[1]
        else:
            return None
        self._block_of[digest] = block
        return block

    def find(self, digest: bytes) -> int:
        """Where `digest` lies. Raises KeyError if it does not."""
        return self._block_of[digest]

    def touch(self, digest: bytes) -> None:
        """It is used: now the most recently. Raises KeyError if it does not lie here."""
        self._block_of.move_to_end(digest)

    def discard(self, host_blocks: Collection[int]) -> None:
        """Forget what should lie there, since the copies failed."""
        for digest in [d for d, block in self._block_of.items() if block in host_blocks]:
            self._free.append(self._block_of.pop(digest))
