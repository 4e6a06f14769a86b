"""The layout of a step over launches: enough programs, no part too short, no needless launch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cb_kernels.shared_prefix import PrefixGroup
from cb_kernels.triton.attention_plan import (
    Heads,
    Segment,
    decode_segment,
    pays,
    prefix_segment,
    segments,
    shape_class,
)
from cb_kernels.triton.chips import CHIPS
from cb_kernels.triton.table import TABLE

LLAMA = Heads(32, 8, 128, torch.bfloat16, torch.bfloat16, None, CHIPS["sm_90"])


def _parts(num_rows: int, num_keys: int, heads: Heads = LLAMA) -> int:
    (segment,) = segments(heads, [1] * num_rows, [num_keys] * num_rows)
    assert segment.options is TABLE["attend"]["decode 128"].get("any")
    return segment.num_parts


def test_parts_come_from_the_work_and_the_processors() -> None:
    assert _parts(64, 4096) == 1  # 512 programs for 132 processors
    assert _parts(16, 4096) == 4
    assert _parts(1, 131072) == 64
    half = replace(LLAMA, chip=replace(LLAMA.chip, num_processors=66))
    assert _parts(16, 4096, half) == 2


def test_a_part_is_at_least_256_keys() -> None:
    assert _parts(1, 200) == 1
    assert _parts(1, 1024) == 4
    (segment,) = segments(LLAMA, [1], [1024])
    assert segment.min_tiles * segment.options["BLOCK_N"] == 256


def test_a_long_row_among_short_ones_is_cut_and_they_are_not() -> None:
    (segment,) = segments(LLAMA, [1] * 64, [131072] + [1024] * 63)
    assert segment.num_parts > 32
    assert segment.min_tiles * segment.options["BLOCK_N"] >= 1024


def test_a_window_leaves_less_to_cut() -> None:
    assert _parts(1, 131072, replace(LLAMA, window=1024)) == 4


def test_a_mixed_step_is_one_launch() -> None:
    (segment,) = segments(LLAMA, [1, 1, 2048], [900, 30, 2048])
    assert (segment.first_row, segment.last_row, segment.num_parts) == (0, 3, 1)
    assert segment.options["BLOCK_M"] >= 64


def test_long_decoding_rows_beside_chunks_have_a_launch_of_their_own() -> None:
    decoding, chunks = segments(LLAMA, [1, 1, 2048], [9000, 30, 2048])
    assert (decoding.first_row, decoding.last_row, chunks.last_row) == (0, 2, 3)
    assert decoding.options["BLOCK_M"] == 16
    assert decoding.num_parts > 1
    # They are found where the batch has them: before the chunks.
    assert len(segments(LLAMA, [2048, 1], [2048, 9000])) == 1


def test_a_few_queries_a_row_are_still_decoding() -> None:
    (segment,) = segments(LLAMA, [5, 1], [4096, 4096])
    assert segment.options["BLOCK_M"] == 16


def test_of_a_deterministic_batch_a_row_decides_alone() -> None:
    def fixed(num_rows: int, num_queries: int, num_keys: int) -> Segment:
        (segment,) = segments(
            LLAMA, [num_queries] * num_rows, [num_keys] * num_rows, deterministic=True
        )
        return segment

    alone, beside, chunk = fixed(1, 1, 4000), fixed(64, 1, 4000), fixed(3, 100, 4000)
    assert alone.options is beside.options is chunk.options
    assert alone.part_tiles == beside.part_tiles == chunk.part_tiles
    assert alone.part_tiles * alone.options["BLOCK_N"] == 1024
    assert (alone.num_parts, beside.num_parts, chunk.num_parts) == (4, 4, 1)


def test_a_graph_is_captured_for_the_longest_rows() -> None:
    segment = decode_segment(LLAMA, 8, 131072, parts=16)
    assert (segment.last_row, segment.num_parts, segment.min_tiles) == (8, 16, 4)
    assert decode_segment(LLAMA, 8, 600, parts=16).num_parts == 3


def _pays(num_rows: int, num_keys: int) -> bool:
    groups = [PrefixGroup(tuple(range(num_rows)), num_keys)]
    return pays(LLAMA, groups, num_rows, prefix_segment(LLAMA, groups).num_parts + 1)


def test_sharing_pays_for_many_rows_and_long_prefixes() -> None:
    assert _pays(64, 4096)
    assert _pays(16, 4096)
    assert not _pays(16, 512)
    assert not _pays(2, 4096)
    assert _pays(2, 65536)


def test_no_rows_are_no_launch() -> None:
    assert segments(LLAMA, [], []) == []


def test_heads_without_a_row_of_the_table_are_refused() -> None:
    assert shape_class("chunk", replace(LLAMA, head_dim=80)) == "chunk 128"
    assert shape_class("decode", replace(LLAMA, head_dim=16)) == "decode 64"
    with pytest.raises(ValueError, match="wider than 256"):
        shape_class("chunk", replace(LLAMA, head_dim=320))
    with pytest.raises(ValueError, match="float8 needs sm_90"):
        shape_class("chunk", replace(LLAMA, cache_dtype=torch.float8_e4m3fn, chip=CHIPS["sm_80"]))
    with pytest.raises(ValueError, match="300 heads on one"):
        segments(replace(LLAMA, num_heads=300, num_kv_heads=1), [1], [9])
