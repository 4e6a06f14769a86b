"""Rows that begin with the same blocks are found, and no further than all of them see."""

from __future__ import annotations

import torch
from cb_kernels.shared_prefix import PrefixGroup, prefix_groups

# Blocks of 16 tokens; entries past a row's own are left over from others.
TABLE = torch.tensor(
    [
        [7, 8, 9, 1],
        [5, 8, 9, 1],
        [7, 8, 9, 2],
        [6, 0, 0, 0],
        [7, 8, 4, 2],
        [5, 3, 9, 1],
    ],
    dtype=torch.int32,
)


def _groups(known: list[int], multiple: int = 16) -> list[PrefixGroup]:
    return prefix_groups(TABLE, known, block_size=16, multiple=multiple)


def test_rows_with_the_same_first_block_share_what_all_of_them_have() -> None:
    assert _groups([63] * 6) == [PrefixGroup((1, 5), 16), PrefixGroup((0, 2, 4), 32)]


def test_a_group_saves_what_all_but_one_need_not_read() -> None:
    assert [group.num_keys_saved for group in _groups([63] * 6)] == [16, 64]


def test_a_prefix_ends_where_the_shortest_row_does() -> None:
    assert _groups([63, 63, 63, 63, 31, 63])[1] == PrefixGroup((0, 2, 4), 16)
    assert _groups([63, 15, 63, 63, 63, 63]) == [PrefixGroup((0, 2, 4), 32)]


def test_a_prefix_ends_with_a_tile() -> None:
    assert _groups([63] * 6, multiple=32) == [PrefixGroup((0, 2, 4), 32)]
    assert _groups([63] * 6, multiple=48) == []


def test_equal_rows_share_all_that_their_queries_see() -> None:
    table = torch.tensor([[3, 4, 5], [3, 4, 5]], dtype=torch.int32)
    assert prefix_groups(table, [40, 47], block_size=16, multiple=16) == [PrefixGroup((0, 1), 32)]


def test_one_row_and_none_share_nothing() -> None:
    assert prefix_groups(TABLE, [63], block_size=16, multiple=16) == []
    assert prefix_groups(TABLE, [], block_size=16, multiple=16) == []
