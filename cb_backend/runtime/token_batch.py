"""The persistent batch: what the executor knows of each running request, one row each.

A plan says only what changed; rows are swapped in and out between steps and the arrays stay.
Sampled tokens never come here: a row's last one stays on the device, where the next step takes it,
so that no step waits for the one before. Engine thread. Host memory only (numpy); the runner moves
a step's inputs to the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cb_backend.core.step_io import Admission, StepPlan, StepRows
from cb_backend.errors import InternalError
from cb_backend.runtime.row_edits import EditedRows, Ints, RowEdits


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """What the sampler needs of the R rows that sample, in one order."""

    temperature: npt.NDArray[np.float32]  # [R]
    top_k: Ints  # [R], 0 for all of the vocabulary
    top_p: npt.NDArray[np.float32]
    min_p: npt.NDArray[np.float32]
    seeds: npt.NDArray[np.uint64]
    positions: Ints  # [R], where in its sequence the sampled token will stand


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step's ragged arrays over S requests and T tokens."""

    token_ids: Ints  # [T], those that were sampled left open
    sampled_tokens: Ints  # [K], which of the T tokens were sampled: the last of each of K rows
    sampled_rows: Ints  # [K], the rows of the batch that sampled them
    positions: Ints  # [T]
    slot_mapping: Ints  # [T], block id * block_size + offset
    query_start_loc: Ints  # [S + 1]
    seq_lens: Ints  # [S], KV length after this step
    block_table: npt.NDArray[np.int32]  # [S, B]
    fresh_block_ids: list[int]  # blocks that hold nothing of their row yet
    batch_rows: Ints  # [R], rows of the batch that sample
    logit_tokens: Ints  # [R], which of the T tokens each of them samples from
    request_ids: list[str]  # [R]
    sampling: SamplingRows
    edits: EditedRows | None = None  # None: no row's logits are edited


@dataclass(frozen=True, slots=True)
class _Columns:
    """A plan's rows, S of each: a step has hundreds, and numpy has no time for one of them."""

    request_ids: tuple[str, ...]
    rows: Ints  # of the batch
    computed: Ints
    counts: Ints  # of scheduled tokens
    new_block_ids: tuple[tuple[int, ...], ...]
    num_new_blocks: Ints
    samples: npt.NDArray[np.bool_]


class TokenBatch:
    """Raises InternalError when a plan does not fit what is here."""

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        vocab_size: int,
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        self._block_size = block_size
        self._row_of: dict[str, int] = {}
        self._free_rows = list(range(max_num_seqs))[::-1]
        max_blocks = -(-max_model_len // block_size)
        # Zeros are mapped on first touch, so a long context costs memory only where it is used.
        self._token_ids = np.zeros((max_num_seqs, max_model_len), np.int32)
        self._num_given = np.zeros(max_num_seqs, np.int64)  # tokens that came with the admission
        self._num_tokens = np.zeros(max_num_seqs, np.int64)  # and with those sampled since
        self._block_table = np.zeros((max_num_seqs, max_blocks), np.int32)
        self._num_blocks = np.zeros(max_num_seqs, np.int64)
        self._temperature = np.zeros(max_num_seqs, np.float32)
        self._top_k = np.zeros(max_num_seqs, np.int64)
        self._top_p = np.ones(max_num_seqs, np.float32)
        self._min_p = np.zeros(max_num_seqs, np.float32)
        self._seeds = np.zeros(max_num_seqs, np.uint64)
        self._edits = RowEdits(vocab_size=vocab_size, eos_token_ids=eos_token_ids)

    def __len__(self) -> int:
        return len(self._row_of)

    def apply(self, plan: StepPlan) -> StepInputs:
        """Swap rows as the plan says and gather the step's inputs."""
        for request_id in plan.retired:
            self._retire(request_id)
        for admission in plan.admitted:
            # Still here if the step that should have retired it failed.
            self._retire(admission.request_id)
            self._admit(admission)
        columns = self._columns(plan.rows)
        self._check(columns)
        return self._gather(columns, self._extend(columns))

    def rename_blocks(self, moved: Mapping[int, int]) -> None:
        """The contents of some blocks now lie in others."""
        table = self._block_table
        for row in self._row_of.values():
            num_blocks = self._num_blocks[row]
            table[row, :num_blocks] = [moved.get(b, b) for b in table[row, :num_blocks].tolist()]

    def _retire(self, request_id: str) -> None:
        row = self._row_of.pop(request_id, None)
        if row is not None:
            self._free_rows.append(row)
            self._edits.retire(row)

    def _admit(self, admission: Admission) -> None:
        num_tokens = len(admission.token_ids)
        if not self._free_rows:
            raise InternalError(f"no row is free for {admission.request_id}")
        if num_tokens > self._token_ids.shape[1]:
            raise InternalError(
                f"{admission.request_id} has {num_tokens} tokens, rows hold"
                f" {self._token_ids.shape[1]}"
            )
        row = self._free_rows.pop()
        self._row_of[admission.request_id] = row
        self._token_ids[row, :num_tokens] = admission.token_ids
        self._num_given[row] = self._num_tokens[row] = num_tokens
        self._num_blocks[row] = 0
        params = admission.params
        self._temperature[row] = params.temperature
        self._top_k[row] = max(params.top_k, 0)
        self._top_p[row] = params.top_p
        self._min_p[row] = params.min_p
        self._seeds[row] = admission.seed & (2**64 - 1)
        self._edits.admit(row, admission, self._token_ids[row, :num_tokens])

    def _columns(self, scheduled: StepRows) -> _Columns:
        try:
            rows = list(map(self._row_of.__getitem__, scheduled.request_ids))
        except KeyError as error:
            raise InternalError(f"{error.args[0]} is scheduled but was never admitted") from None
        return _Columns(
            request_ids=scheduled.request_ids,
            rows=np.array(rows, np.int64),
            computed=np.array(scheduled.num_computed_tokens, np.int64),
            counts=np.array(scheduled.num_scheduled_tokens, np.int64),
            new_block_ids=scheduled.new_block_ids,
            num_new_blocks=np.array(list(map(len, scheduled.new_block_ids)), np.int64),
            samples=np.array(scheduled.samples, bool),
        )

    def _check(self, columns: _Columns) -> None:
        """Before anything of the step is written down."""
        seq_lens, num_tokens = columns.computed + columns.counts, self._num_tokens[columns.rows]
        num_blocks = self._num_blocks[columns.rows] + columns.num_new_blocks
        oldest = np.maximum(columns.computed, self._num_given[columns.rows])  # that was sampled
        most_blocks = self._block_table.shape[1]
        fits = (
            (seq_lens <= np.minimum(num_tokens, num_blocks * self._block_size))
            & (oldest >= num_tokens - 1)
            & (num_blocks <= most_blocks)
        )
        if fits.all():
            return
        first = int(fits.argmin())
        request_id, known, held = columns.request_ids[first], num_tokens[first], num_blocks[first]
        if seq_lens[first] > min(known, held * self._block_size):
            raise InternalError(
                f"{request_id} would have {seq_lens[first]} computed tokens, with"
                f" {known} known and {held} blocks of {self._block_size}"
            )
        if held > most_blocks:
            raise InternalError(f"{request_id} has {held} blocks, more than a row holds")
        raise InternalError(f"{request_id} needs more than its last sampled token")

    def _extend(self, columns: _Columns) -> list[int]:
        """Append the rows' new blocks; those of them that hold none of their row's tokens yet."""
        fresh: list[int] = []
        for i in np.flatnonzero(columns.num_new_blocks).tolist():
            row, new_block_ids = columns.rows[i], columns.new_block_ids[i]
            start = int(self._num_blocks[row])
            end = start + len(new_block_ids)
            self._block_table[row, start:end] = new_block_ids
            self._num_blocks[row] = end
            num_filled = -(-int(columns.computed[i]) // self._block_size)
            fresh += new_block_ids[max(0, num_filled - start) :]
        return fresh

    def _gather(self, columns: _Columns, fresh: list[int]) -> StepInputs:
        # Rows of one token first, longest first: attention gathers rows of like length together,
        # and finds them side by side.
        order = np.lexsort((-columns.computed, columns.counts > 1))
        rows, computed, counts = columns.rows[order], columns.computed[order], columns.counts[order]
        query_start_loc = np.concatenate(([0], np.cumsum(counts)))  # [S + 1]
        token_rows = np.repeat(rows, counts)  # [T]
        positions = np.arange(query_start_loc[-1]) + np.repeat(
            computed - query_start_loc[:-1], counts
        )
        blocks, offsets = np.divmod(positions, self._block_size)
        samples, seq_lens = columns.samples[order], computed + counts
        sampling_rows, sampled_positions = rows[samples], seq_lens[samples]
        self._num_tokens[sampling_rows] += 1
        sampled = np.flatnonzero(positions >= self._num_given[token_rows])
        return StepInputs(
            token_ids=self._token_ids[token_rows, positions].astype(np.int64),
            sampled_tokens=sampled,
            sampled_rows=token_rows[sampled],
            positions=positions,
            slot_mapping=self._block_table[token_rows, blocks].astype(np.int64) * self._block_size
            + offsets,
            query_start_loc=query_start_loc,
            seq_lens=seq_lens,
            block_table=self._block_table[rows, : int(self._num_blocks[rows].max(initial=1))],
            fresh_block_ids=fresh,
            batch_rows=sampling_rows,
            logit_tokens=query_start_loc[1:][samples] - 1,
            request_ids=[columns.request_ids[i] for i in order[samples].tolist()],
            sampling=self._sampling(sampling_rows, sampled_positions),
            edits=self._edits.gather(sampling_rows, sampled_positions),
        )

    def _sampling(self, rows: Ints, positions: Ints) -> SamplingRows:
        return SamplingRows(
            temperature=self._temperature[rows],
            top_k=self._top_k[rows],
            top_p=self._top_p[rows],
            min_p=self._min_p[rows],
            seeds=self._seeds[rows],
            positions=positions,
        )
