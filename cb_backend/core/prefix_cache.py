"""Finds KV blocks that already hold a prompt's beginning. Engine thread only.

A full block is known by a SHA-256 chain: the digest of (parent digest, its token ids), rooted in
the salt, so equal digests mean equal whole prefixes, and requests with different salts never meet.
A cryptographic hash, because a collision would serve one user's context to another.
(The scheme of vLLM's automatic prefix caching.)
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import cache
from struct import Struct

from cb_backend.core.block_pool import BlockPool


def root_digest(salt: str, adapter: str = "") -> bytes:
    """The parent of a sequence's first block."""
    # Length-prefixed, so that no salt can pretend to be another salt and adapter.
    salt_bytes, adapter_bytes = salt.encode(), adapter.encode()
    head = len(salt_bytes).to_bytes(8, "little")
    return hashlib.sha256(b"cb-root" + head + salt_bytes + adapter_bytes).digest()


def extend_block_hashes(
    block_hashes: list[bytes], token_ids: Sequence[int], *, block_size: int, salt: str
) -> None:
    """Append the digests of the full blocks of `token_ids` that `block_hashes` lacks."""
    parent = block_hashes[-1] if block_hashes else root_digest(salt)
    pack = _packing(block_size)
    for start in range(len(block_hashes) * block_size, len(token_ids) - block_size + 1, block_size):
        tokens = pack(*token_ids[start : start + block_size])
        parent = hashlib.sha256(parent + tokens).digest()
        block_hashes.append(parent)


@cache
def _packing(num_tokens: int) -> Callable[..., bytes]:
    return Struct(f"{num_tokens}q").pack


class PrefixCache:
    """An index from digest to block. The pool decides how long an idle block lives."""

    def __init__(self, pool: BlockPool, on_evict: Callable[[int, bytes], None]) -> None:
        """`on_evict(block_id, digest)` is called while the block still holds what it held."""
        self._pool = pool
        self._on_evict = on_evict
        self._block_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}
        pool.set_evict_callback(self._forget)

    def __len__(self) -> int:
        return len(self._block_of)

    @property
    def indexed_blocks(self) -> dict[int, bytes]:
        return dict(self._digest_of)

    def match(self, block_hashes: Sequence[bytes]) -> list[int]:
        """The blocks of the longest known beginning of `block_hashes`. Takes no ownership."""
        found = []
        for digest in block_hashes:
            if (block_id := self._block_of.get(digest)) is None:
                break
            found.append(block_id)
        return found

    def insert(self, digest: bytes, block_id: int) -> None:
        """Make a full, computed block findable. The first block of equal contents stays."""
        if digest in self._block_of or block_id in self._digest_of:
            return
        self._block_of[digest] = block_id
        self._digest_of[block_id] = digest
        self._pool.mark_cached(block_id)

    def rename(self, moved: dict[int, int]) -> None:
        """The contents of some blocks now lie in others."""
        self._digest_of = {moved.get(b, b): digest for b, digest in self._digest_of.items()}
        self._block_of = {digest: block_id for block_id, digest in self._digest_of.items()}

    def _forget(self, block_id: int) -> None:
        digest = self._digest_of.pop(block_id)
        del self._block_of[digest]
        self._on_evict(block_id, digest)
