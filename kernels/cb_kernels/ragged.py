"""What one step's rows look like to the paged operations, and the gather plans derived from it.

A plan depends on the step and the sliding window, never on the layer, so each is built once a step
and kept on the batch. All planning is on the host: nothing here waits for a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

# Keys that a decode group may pad before splitting it pays: one more group costs about as much
# time in operator calls as gathering this many (K and V, one layer, CPU).
_KEYS_PER_SPLIT = 2048


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Rows of one query token each whose gathered keys are padded to one length L."""

    tokens: Tensor  # [n] int64, where the rows' queries are in q
    pages: Tensor  # [n, L / block_size] int64
    bias: Tensor | None  # [n, L] float32, 0 or -inf; None when nothing is padded or masked


@dataclass(frozen=True, slots=True)
class Chunk:
    """One row of several query tokens and the keys they may see."""

    start: int  # first token in q
    stop: int
    pages: Tensor  # [B] int64
    num_keys: int  # of the gathered keys, those that exist
    visible: Tensor | None  # [stop - start, num_keys] bool; None: exactly causal


@dataclass(frozen=True, slots=True)
class GatherPlan:
    groups: tuple[DecodeGroup, ...]
    chunks: tuple[Chunk, ...]


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
    _plans: dict[int | None, GatherPlan] = field(default_factory=dict, init=False, repr=False)

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

    def plan(self, sliding_window: int | None) -> GatherPlan:
        """The gather plan for layers with this window (None: all keys), built at first use."""
        if sliding_window not in self._plans:
            self._plans[sliding_window] = self._build(sliding_window)
        return self._plans[sliding_window]

    def _build(self, window: int | None) -> GatherPlan:
        rows = range(len(self.seq_lens))
        singles = [row for row in rows if self.num_queries(row) == 1]
        singles.sort(key=lambda row: -self._num_pages(row, window))
        return GatherPlan(
            tuple(self._group(group, window) for group in self._split(singles, window)),
            tuple(self._chunk(row, window) for row in rows if self.num_queries(row) > 1),
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

    def _group(self, rows: list[int], window: int | None) -> DecodeGroup:
        num_pages = self._num_pages(rows[0], window)
        first = torch.tensor([self._first_page(row, window) for row in rows])
        lens = torch.tensor([self.seq_lens[row] for row in rows])
        columns = first[:, None] + torch.arange(num_pages)
        last = (lens - 1)[:, None] // self.block_size
        # Padding repeats the row's last page: always a page that may be read.
        table = self.block_table[torch.tensor(rows)]
        pages = table.gather(1, torch.minimum(columns, last).long()).long()
        keys = first[:, None] * self.block_size + torch.arange(num_pages * self.block_size)
        hidden = keys >= lens[:, None]
        if window is not None:
            hidden |= keys < lens[:, None] - window
        bias = None
        if bool(hidden.any()):
            bias = torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf).to(self.device)
        tokens = torch.tensor([self.query_start_loc[row] for row in rows])
        return DecodeGroup(tokens.to(self.device), pages.to(self.device), bias)

    def _chunk(self, row: int, window: int | None) -> Chunk:
        seq_len, num_queries = self.seq_lens[row], self.num_queries(row)
        first_page = self._first_page(row, window)
        first_key = first_page * self.block_size
        num_keys = seq_len - first_key
        pages = self.block_table[row, first_page : (seq_len - 1) // self.block_size + 1].long()
        visible = None
        if num_keys != num_queries or (window is not None and window < num_keys):
            queries = torch.arange(seq_len - num_queries, seq_len)[:, None]
            keys = torch.arange(first_key, seq_len)
            visible = keys <= queries
            if window is not None:
                visible &= keys > queries - window
            visible = visible.to(self.device)
        start = self.query_start_loc[row]
        return Chunk(start, start + num_queries, pages.to(self.device), num_keys, visible)
