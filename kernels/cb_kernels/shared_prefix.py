"""Which rows of a step begin with the same blocks. On the host, from the block table alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PrefixGroup:
    """Rows whose first `num_keys` keys lie in the same blocks."""

    rows: tuple[int, ...]
    num_keys: int

    @property
    def num_keys_saved(self) -> int:
        """Keys that need not be read when the group reads its prefix once."""
        return (len(self.rows) - 1) * self.num_keys


def prefix_groups(
    block_table: Tensor, num_known: Sequence[int], *, block_size: int, multiple: int
) -> list[PrefixGroup]:
    """Groups of at least two rows of the table [S, B] with the same first block.

    `num_known`: keys of each row that all of its queries see. A prefix ends at a multiple of
    `multiple` keys and takes whole blocks; rows with nothing in common are in no group. One prefix
    a group: of rows that share more among themselves than with the rest, that is not found.
    """
    if len(num_known) < 2:
        return []
    first = block_table[: len(num_known), 0]
    order = torch.argsort(first, stable=True)
    _, counts = torch.unique_consecutive(first[order], return_counts=True)
    groups = []
    for rows in torch.split(order, counts.tolist()):
        if len(rows) > 1:
            limit = min(num_known[row] for row in rows.tolist())
            blocks = block_table[rows, : limit // block_size]
            differs = (blocks != blocks[:1]).any(0)
            num_shared = int(differs.int().argmax()) if bool(differs.any()) else blocks.shape[1]
            num_keys = num_shared * block_size // multiple * multiple
            if num_keys:
                groups.append(PrefixGroup(tuple(rows.tolist()), num_keys))
    return groups
