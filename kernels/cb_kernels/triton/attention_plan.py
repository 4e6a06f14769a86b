"""How the rows of a step are laid out over launches of the attention kernel. Host only, no triton.

What is chosen: the tiles (a row of the launch table), into how many parts the keys are cut, whether
decoding rows get a launch of their own, and whether a prefix that rows share is read once for all.
None of it needs to know anything that is only on the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from cb_kernels.shared_prefix import PrefixGroup
from cb_kernels.triton.chips import Chip
from cb_kernels.triton.table import Options, options

# Programs for each processor that the parts are to make: enough to hide the end of the longest.
_PROGRAMS_PER_PROCESSOR = 4
# A part shorter than this many keys costs more to fold than it gains.
_LEAST_KEYS_OF_A_PART = 256
# Of a batch that must be deterministic: the same for all rows, so that a row's parts do not depend
# on the rest of the batch.
_KEYS_OF_A_FIXED_PART = 1024
# Parts of all rows that a launch makes room for when it does not know which of them there will be.
_MOST_FIXED_PARTS = 1024
# A row of one query walks its keys alone when it shares a launch with chunks. Past this many it
# would still be walking when they are done, so it gets a launch where its keys are cut.
_LONG_FOR_ONE_PROGRAM = 4096

# What an H200 could read in the time that one launch and the fold of one more part take, about
# 10 us; and what of a read of shared blocks is saved when the cache of the chip would have kept
# them. Both are assumed, not measured.
_BYTES_OF_A_LAUNCH = 40e6
_SAVED_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Heads:
    """What of q and the caches the choice depends on."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype  # of q
    cache_dtype: torch.dtype
    window: int | None
    chip: Chip

    @property
    def group_size(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def padded_dim(self) -> int:
        """The power of two that holds head_dim; the matrix units want 16."""
        return max(16, 2 ** (self.head_dim - 1).bit_length())


@dataclass(frozen=True, slots=True)
class Segment:
    """One launch over consecutive rows."""

    first_row: int
    last_row: int  # exclusive
    options: Options
    num_parts: int
    part_tiles: int  # of a part at a fixed place; 0: parts are shares
    min_tiles: int  # of a part that is a share


def segments(
    heads: Heads,
    num_queries: Sequence[int],
    num_keys: Sequence[int],
    *,
    deterministic: bool = False,
) -> list[Segment]:
    """The launches for rows of so many queries and keys, this step's keys included."""
    if not num_keys:
        return []
    num_rows = len(num_keys)
    num_single = next((row for row, n in enumerate(num_queries) if n > 1), num_rows)
    cut = 0
    if num_single < num_rows and num_single:
        longest = max(_seen(heads, num_keys[row]) for row in range(num_single))
        cut = num_single if longest > _LONG_FOR_ONE_PROGRAM else 0
    return [
        _segment(heads, first, num_queries[first:last], num_keys[first:last], deterministic)
        for first, last in ((0, cut), (cut, num_rows))
        if first < last
    ]


def decode_segment(heads: Heads, num_rows: int, max_keys: int, *, parts: int) -> Segment:
    """The launch for rows of one query of which only the most keys are known: a CUDA graph's."""
    config = options("attend", shape_class("decode", heads), heads.chip)
    min_tiles = _LEAST_KEYS_OF_A_PART // config["BLOCK_N"]
    most = math.ceil(_seen(heads, max_keys) / (min_tiles * config["BLOCK_N"]))
    return Segment(0, num_rows, config, min(parts, most), 0, min_tiles)


def graph_segment(heads: Heads, num_rows: int, max_keys: int, *, deterministic: bool) -> Segment:
    """The same with as many parts as the processors want of rows that are all long."""
    if not deterministic:
        programs = _PROGRAMS_PER_PROCESSOR * heads.chip.num_processors
        parts = max(1, programs // (num_rows * heads.num_kv_heads))
        return decode_segment(heads, num_rows, max_keys, parts=parts)
    segment = _segment(heads, 0, [1] * num_rows, [max_keys] * num_rows, True)
    # A program that walks all parts gets the same bits as one for each.
    too_many = num_rows * segment.num_parts > _MOST_FIXED_PARTS
    return replace(segment, num_parts=1) if too_many else segment


def prefix_segment(heads: Heads, groups: Sequence[PrefixGroup]) -> Segment:
    """The launch over the prefixes of groups, each as one row."""
    queries = [len(group.rows) for group in groups]
    return _segment(heads, 0, queries, [group.num_keys for group in groups], False)


def pays(heads: Heads, groups: Sequence[PrefixGroup], num_tokens: int, num_parts: int) -> bool:
    """Whether reading the groups' prefixes once gains more than a launch and the fold cost.

    Saved: the bytes of K and V that are not read again, less what the chip's cache would have
    given. Spent: a launch, and float32 parts of every token, written and read.
    """
    key_bytes = 2 * heads.num_kv_heads * heads.head_dim * heads.cache_dtype.itemsize
    saved = sum(group.num_keys_saved for group in groups) * key_bytes * _SAVED_SHARE
    part_bytes = 2 * 4 * heads.num_heads * (heads.head_dim + 2)
    return saved > _BYTES_OF_A_LAUNCH + num_tokens * num_parts * part_bytes


def shape_class(kind: str, heads: Heads) -> str:
    """The row of the launch table. Raises ValueError for heads that no row is for."""
    if heads.padded_dim > 256:
        raise ValueError(f"heads of {heads.head_dim} are wider than 256")
    if heads.cache_dtype.itemsize == 1 and heads.chip.name not in ("sm_90", "sm_100"):
        raise ValueError(f"a cache in float8 needs sm_90 or newer, this is {heads.chip.name}")
    if heads.dtype == torch.float32:
        kind = "float32"
    return f"{kind} {max(64, heads.padded_dim)}"


def _segment(
    heads: Heads,
    first_row: int,
    num_queries: Sequence[int],
    num_keys: Sequence[int],
    deterministic: bool,
) -> Segment:
    most_queries = max(num_queries)
    last_row = first_row + len(num_keys)
    config = options(
        "attend", shape_class("fixed" if deterministic else "decode", heads), heads.chip
    )
    # A block's keys are read again for each further block of queries, hence one or two.
    few = most_queries * heads.group_size <= 2 * config["BLOCK_M"] and heads.group_size <= 16
    if not deterministic and not few:
        config = options("attend", shape_class("chunk", heads), heads.chip)
    block_q = config["BLOCK_M"] // heads.group_size
    if block_q == 0:
        raise ValueError(f"{heads.group_size} heads on one KV head are more than a tile takes")
    if deterministic:
        # Rows of several queries have programs enough, and their parts would fill the memory.
        num_parts = -(-max(num_keys) // _KEYS_OF_A_FIXED_PART) if most_queries == 1 else 1
        part_tiles = _KEYS_OF_A_FIXED_PART // config["BLOCK_N"]
        return Segment(first_row, last_row, config, num_parts, part_tiles, 0)
    block_n = config["BLOCK_N"]
    blocks = [-(-queries // block_q) for queries in num_queries]
    tiles = [-(-_seen(heads, keys) // block_n) for keys in num_keys]
    programs = _PROGRAMS_PER_PROCESSOR * heads.chip.num_processors
    # Chunks alone may be programs enough; their parts would take much memory.
    if most_queries > 1 and sum(blocks) * heads.num_kv_heads * 2 > programs:
        return Segment(first_row, last_row, config, 1, 0, 0)
    # What each program has to do if all do the same.
    work = sum(b * t for b, t in zip(blocks, tiles, strict=True)) * heads.num_kv_heads
    share = max(-(-work // programs), _LEAST_KEYS_OF_A_PART // block_n)
    num_parts = max(1, max(tiles) // share)
    return Segment(first_row, last_row, config, num_parts, 0, -(-max(tiles) // num_parts))


def _seen(heads: Heads, num_keys: int) -> int:
    """Of a row's keys, those that its last query sees."""
    return num_keys if heads.window is None else min(num_keys, heads.window)
