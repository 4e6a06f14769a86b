"""Token ids in place of those that a recording does not hold.

Two sequences get the same ids exactly where their recorded blocks were the same, so the prefix
cache of a replay finds what the recorded one found. Within a sequence no id comes twice, so its
last one can serve as a stop token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cb_backend.core.prefix_cache import extend_block_hashes


class TokenIds:
    """Gives each block hash a range of ids of its own, in the order in which they come."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._number_of: dict[str, int] = {}
        self._num_blocks = 0

    def sequence(self, blocks: Sequence[str], num_tokens: int) -> list[int]:
        """`num_tokens` ids; those after the full `blocks` are like no others."""
        token_ids: list[int] = []
        num_all = -(-num_tokens // self._block_size)
        for index in range(num_all):
            number = self._known(blocks[index]) if index < len(blocks) else self._new()
            first = number * self._block_size
            token_ids.extend(range(first, first + self._block_size))
        return token_ids[:num_tokens]

    def digests(self, block_lists: Iterable[Sequence[str]]) -> dict[str, bytes]:
        """What the prefix cache will call each block, given the whole sequences it stands in."""
        found: dict[str, bytes] = {}
        for blocks in block_lists:
            digests: list[bytes] = []
            token_ids = self.sequence(blocks, len(blocks) * self._block_size)
            extend_block_hashes(digests, token_ids, block_size=self._block_size, salt="")
            found.update(zip(blocks, digests, strict=True))
        return found

    def _known(self, block: str) -> int:
        if block not in self._number_of:
            self._number_of[block] = self._new()
        return self._number_of[block]

    def _new(self) -> int:
        self._num_blocks += 1
        return self._num_blocks - 1
