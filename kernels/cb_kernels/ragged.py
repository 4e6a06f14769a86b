"""What one step's rows look like to the paged operations, and the gather plans derived from it.

A plan depends on the step and the sliding window, never on the layer, so each is built once a step
and kept on the batch. All planning is on the host: nothing here waits for a device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar, cast

import torch
from torch import Tensor

# Keys that a decode group may pad before splitting it pays: one more group costs about as much
# time in operator calls as gathering this many (K and V, one layer, CPU).
_KEYS_PER_SPLIT = 1024

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """What of a cache's shape and order a plan depends on."""

    num_blocks: int
    num_kv_heads: int
    heads_outside: bool  # physically [H_kv, N, block_size, D]
    dtype: torch.dtype

    @classmethod
    def of(cls, cache: Tensor) -> CacheLayout:
        """The layout of a cache of logical shape [N, block_size, H_kv, D]."""
        num_blocks, _, num_kv_heads, _ = cache.shape
        outside = cache.permute(2, 0, 1, 3).is_contiguous()
        return cls(num_blocks, num_kv_heads, outside, cache.dtype)

    def page_index(self, pages: Tensor) -> Tensor:
        """What to gather for pages [n, B]: rows [n * H_kv * B] of the cache seen as
        [H_kv * N, block_size * D] when the heads are outside, the pages themselves otherwise."""
        if not self.heads_outside:
            return pages
        offsets = torch.arange(self.num_kv_heads)[:, None] * self.num_blocks
        return (pages[:, None, :] + offsets).flatten()


class Workspace:
    """Buffers that gathers reuse from layer to layer and step to step, so that they stay in the
    processor's cache. One forward pass at a time."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """An uninitialised tensor, overwritten by the next `take` of that name."""
        size = math.prod(shape)
        buffer = self._buffers.get((name, like.dtype))
        if buffer is None or buffer.numel() < size:
            buffer = torch.empty(size, dtype=like.dtype, device=like.device)
            self._buffers[name, like.dtype] = buffer
        return buffer[:size].view(shape)


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Rows of one query token each whose gathered keys are padded to one length L."""

    tokens: slice | Tensor  # where the n rows' queries are in q
    num_rows: int
    num_keys: int  # L
    page_index: Tensor  # see CacheLayout.page_index
    bias: Tensor | None  # [n * H_kv, 1, L], 0 or -inf; None when nothing is padded or masked


@dataclass(frozen=True, slots=True)
class Chunk:
    """One row of several query tokens and the keys they may see."""

    start: int  # first token in q
    stop: int
    num_gathered: int  # keys in whole pages
    page_index: Tensor  # see CacheLayout.page_index
    num_keys: int  # of the gathered keys, those that exist
    visible: Tensor | None  # [stop - start, num_keys] bool; None: exactly causal


@dataclass(frozen=True, slots=True)
class GatherPlan:
    groups: tuple[DecodeGroup, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows as a kernel sees them: int32 tensors on its device."""

    block_table: Tensor  # [S, B]
    query_start_loc: Tensor  # [S + 1]
    seq_lens: Tensor  # [S]


@dataclass(slots=True, eq=False)
class RaggedBatch:
    """S rows, T query tokens; row s owns tokens query_start_loc[s] to query_start_loc[s + 1].

    `seq_lens` counts keys including this step's, so a row's queries are its last positions.
    Raises ValueError when the counts disagree or a row's table is too short for its length.
    """

    block_table: Tensor  # [S, B] integer, on the host; entries past a row's length are ignored
    query_start_loc: Sequence[int]  # [S + 1]
    seq_lens: Sequence[int]  # [S]
    block_size: int
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    workspace: Workspace = field(default_factory=Workspace)
    # The rows where the device has them already; None: they are copied there at first use.
    on_device: Rows | None = None
    # Of rows of one query each whose lengths and blocks may change before the launch runs: the most
    # keys that any of them has then. None: they are what is here.
    max_keys: int | None = None
    # A token's attention is to be the same to the bit in any batch, cut into any chunks.
    deterministic: bool = False
    _derived: dict[Hashable, object] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        rows = len(self.seq_lens)
        if len(self.query_start_loc) != rows + 1 or self.block_table.shape[0] != rows:
            raise ValueError(
                f"{rows} seq_lens need {rows + 1} query_start_loc and {rows} table rows, got"
                f" {len(self.query_start_loc)} and {self.block_table.shape[0]}"
            )
        if rows and max(self.seq_lens) > self.block_table.shape[1] * self.block_size:
            raise ValueError(
                f"a row of {max(self.seq_lens)} keys needs more than the table's"
                f" {self.block_table.shape[1]} blocks of {self.block_size}"
            )
        for row, seq_len in enumerate(self.seq_lens):
            if not 1 <= self.num_queries(row) <= seq_len:
                raise ValueError(
                    f"row {row} has {self.num_queries(row)} query tokens and {seq_len} keys"
                )

    @property
    def num_tokens(self) -> int:
        return self.query_start_loc[-1]

    def num_queries(self, row: int) -> int:
        return self.query_start_loc[row + 1] - self.query_start_loc[row]

    def host_rows(self) -> tuple[Tensor, Tensor, Tensor]:
        """Block table [S, B], query_start_loc [S + 1] and seq_lens [S], int32 and contiguous."""
        return self.derived("host_rows", self._host_rows)

    def _host_rows(self) -> tuple[Tensor, Tensor, Tensor]:
        if self.on_device is not None and self.device.type == "cpu":
            rows = self.on_device
            return rows.block_table.contiguous(), rows.query_start_loc, rows.seq_lens
        return (
            self.block_table.to(torch.int32).contiguous(),
            torch.tensor(self.query_start_loc, dtype=torch.int32),
            torch.tensor(self.seq_lens, dtype=torch.int32),
        )

    def rows(self) -> Rows:
        """The rows on the batch's device, copied there in one go at first use."""
        if self.on_device is not None:
            return self.on_device
        return self.derived("rows", lambda: Rows(*to_device(self.host_rows(), self.device)))

    def derived(self, key: Hashable, build: Callable[[], _T]) -> _T:
        """What `build` gives at the first call with this key: a plan that all layers share."""
        if key not in self._derived:
            self._derived[key] = build()
        return cast("_T", self._derived[key])

    def plan(self, sliding_window: int | None, layout: CacheLayout) -> GatherPlan:
        """The gather plan for layers with this window (None: all keys), built at first use."""
        return self.derived(
            ("gather", sliding_window, layout), lambda: self._build(sliding_window, layout)
        )

    def _build(self, window: int | None, layout: CacheLayout) -> GatherPlan:
        rows = range(len(self.seq_lens))
        singles = [row for row in rows if self.num_queries(row) == 1]
        singles.sort(key=lambda row: -self._num_pages(row, window))
        return GatherPlan(
            tuple(self._group(group, window, layout) for group in self._split(singles, window)),
            tuple(self._chunk(row, window, layout) for row in rows if self.num_queries(row) > 1),
        )

    def _first_page(self, row: int, window: int | None) -> int:
        """The first page that any query of the row can see."""
        if window is None:
            return 0
        return max(0, self.seq_lens[row] - self.num_queries(row) - window + 1) // self.block_size

    def _num_pages(self, row: int, window: int | None) -> int:
        last_page = (self.seq_lens[row] - 1) // self.block_size
        return last_page + 1 - self._first_page(row, window)

    def _split(self, rows: list[int], window: int | None) -> list[list[int]]:
        """Cut rows, sorted by pages descending, where the padding saved outweighs a group."""
        if not rows:
            return []
        counts = [self._num_pages(row, window) for row in rows]
        saved = [(counts[0] - count) * (len(rows) - i) for i, count in enumerate(counts)]
        cut = max(range(len(rows)), key=saved.__getitem__)
        if saved[cut] * self.block_size < _KEYS_PER_SPLIT:
            return [rows]
        return self._split(rows[:cut], window) + self._split(rows[cut:], window)

    def _group(self, rows: list[int], window: int | None, layout: CacheLayout) -> DecodeGroup:
        num_pages = self._num_pages(rows[0], window)
        num_keys = num_pages * self.block_size
        first = torch.tensor([self._first_page(row, window) for row in rows])
        lens = torch.tensor([self.seq_lens[row] for row in rows])
        # Padding repeats the row's last page: always a page that may be read.
        last = (lens - 1)[:, None] // self.block_size
        columns = torch.minimum(first[:, None] + torch.arange(num_pages), last)
        pages = self.block_table[torch.tensor(rows)].long().gather(1, columns)
        keys = first[:, None] * self.block_size + torch.arange(num_keys)
        hidden = keys >= lens[:, None]
        if window is not None:
            hidden |= keys < lens[:, None] - window
        bias = None
        if bool(hidden.any()):
            zeros = torch.zeros(hidden.shape, dtype=layout.dtype)
            bias = zeros.masked_fill_(hidden, -torch.inf).to(self.device)
            bias = bias.repeat_interleave(layout.num_kv_heads, 0)[:, None]
        tokens = [self.query_start_loc[row] for row in rows]
        return DecodeGroup(
            tokens=_as_slice(tokens, self.device),
            num_rows=len(rows),
            num_keys=num_keys,
            page_index=layout.page_index(pages).to(self.device),
            bias=bias,
        )

    def _chunk(self, row: int, window: int | None, layout: CacheLayout) -> Chunk:
        seq_len, num_queries = self.seq_lens[row], self.num_queries(row)
        first_page = self._first_page(row, window)
        num_pages = self._num_pages(row, window)
        first_key = first_page * self.block_size
        num_keys = seq_len - first_key
        pages = self.block_table[row, first_page : first_page + num_pages].long()
        visible = None
        if num_keys != num_queries or (window is not None and window < num_keys):
            queries = torch.arange(seq_len - num_queries, seq_len)[:, None]
            keys = torch.arange(first_key, seq_len)
            visible = keys <= queries
            if window is not None:
                visible &= keys > queries - window
            visible = visible.to(self.device)
        start = self.query_start_loc[row]
        return Chunk(
            start=start,
            stop=start + num_queries,
            num_gathered=num_pages * self.block_size,
            page_index=layout.page_index(pages[None]).to(self.device),
            num_keys=num_keys,
            visible=visible,
        )


def to_device(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """int32 tensors of the host, moved in one copy; each begins at a multiple of 16 bytes."""
    if device.type == "cpu":
        return list(tensors)
    starts = [0]
    for tensor in tensors:
        starts.append(starts[-1] + (tensor.numel() + 3) // 4 * 4)
    packed = torch.empty(starts[-1], dtype=torch.int32, pin_memory=device.type == "cuda")
    for start, tensor in zip(starts, tensors, strict=False):
        packed[start : start + tensor.numel()] = tensor.flatten()
    moved = packed.to(device, non_blocking=True)
    return [
        moved[start : start + tensor.numel()].view(tensor.shape)
        for start, tensor in zip(starts, tensors, strict=False)
    ]


def _as_slice(tokens: list[int], device: torch.device) -> slice | Tensor:
    """Consecutive tokens need no index: a slice of q is a view."""
    if tokens == list(range(tokens[0], tokens[0] + len(tokens))):
        return slice(tokens[0], tokens[0] + len(tokens))
    return torch.tensor(tokens, device=device)
