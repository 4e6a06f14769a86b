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
from cb_backend.runtime.row_edits import Ints, RowEdits
from cb_backend.runtime.step_inputs import SamplingRows, StepInputs


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


@dataclass(frozen=True, slots=True)
class _Decoding:
    """A step whose S rows each computed one token and sampled the next: as a rule the next step
    goes on from it (see `core.cohort`), and finds most of its arrays here."""

    scheduled: StepRows
    order: Ints  # of the rows in the step
    inputs: StepInputs

    def goes_on_in(self, plan: StepPlan) -> bool:
        own, rows = self.scheduled, plan.rows
        return (
            not (plan.retired or plan.admitted)
            and rows.request_ids == own.request_ids
            and rows.num_scheduled_tokens == own.num_scheduled_tokens
            and rows.samples == own.samples
        )


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
        self._decoding: _Decoding | None = None  # the last step, if it was one

    def __len__(self) -> int:
        return len(self._row_of)

    def apply(self, plan: StepPlan) -> StepInputs:
        """Swap rows as the plan says and gather the step's inputs."""
        before, self._decoding = self._decoding, None
        if before and before.goes_on_in(plan) and (inputs := self._go_on(before, plan.rows)):
            return inputs
        for request_id in plan.retired:
            self._retire(request_id)
        for admission in plan.admitted:
            # Still here if the step that should have retired it failed.
            self._retire(admission.request_id)
            self._admit(admission)
        columns = self._columns(plan.rows)
        self._check(columns)
        fresh = self._extend(columns.rows, columns.computed, columns.new_block_ids)
        return self._gather(plan.rows, columns, fresh)

    def rename_blocks(self, moved: Mapping[int, int]) -> None:
        """The contents of some blocks now lie in others."""
        self._decoding = None
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

    def _extend(
        self, rows: Ints, computed: Ints, new_block_ids: tuple[tuple[int, ...], ...]
    ) -> list[int]:
        """Append the rows' new blocks; those of them that hold none of their row's tokens yet."""
        fresh: list[int] = []
        for i, block_ids in enumerate(new_block_ids):
            if not block_ids:
                continue
            start = int(self._num_blocks[rows[i]])
            end = start + len(block_ids)
            self._block_table[rows[i], start:end] = block_ids
            self._num_blocks[rows[i]] = end
            num_filled = -(-int(computed[i]) // self._block_size)
            fresh += block_ids[max(0, num_filled - start) :]
        return fresh

    def _go_on(self, before: _Decoding, scheduled: StepRows) -> StepInputs | None:
        """What the way through `_check` and `_gather` gives: a row that has sampled goes on with
        that token, its last. None, with nothing done, where that raises, or for unusual blocks."""
        last = before.inputs
        rows, table, slots = last.batch_rows, last.block_table, last.slot_mapping + 1
        positions = np.array(scheduled.num_computed_tokens, np.int64)[before.order]
        begins = (positions % self._block_size == 0).nonzero()[0]  # the first tokens of a block
        num_new = len(scheduled.new_block_ids) - scheduled.new_block_ids.count(())
        if len(begins) != num_new or np.count_nonzero(positions != last.seq_lens):
            return None
        fresh: list[int] = []
        if num_new:
            places = before.order[begins].tolist()
            new = [scheduled.new_block_ids[place] for place in places]
            growing, index = rows[begins], positions[begins] // self._block_size
            if not self._begin(growing, index, new):
                return None
            fresh = [scheduled.new_block_ids[place][0] for place in sorted(places)]
            block_ids = self._block_table[growing, index]
            slots[begins] = block_ids * np.int64(self._block_size)
            num_blocks = int(index[index.argmax()]) + 1
            if num_blocks <= table.shape[1]:
                table = table.copy()
                table[begins, index] = block_ids
            else:
                table = self._block_table[rows, :num_blocks]
        seq_lens = positions + 1
        self._num_tokens[rows] += 1
        inputs = StepInputs(
            token_ids=np.zeros(len(rows), np.int64),
            sampled_tokens=last.logit_tokens,
            sampled_rows=rows,
            positions=positions,
            slot_mapping=slots,
            query_start_loc=last.query_start_loc,
            seq_lens=seq_lens,
            block_table=table,
            fresh_block_ids=fresh,
            batch_rows=rows,
            logit_tokens=last.logit_tokens,
            request_ids=last.request_ids,
            sampling=last.sampling.at(seq_lens),
            edits=self._edits.gather(rows, seq_lens),
        )
        self._decoding = _Decoding(scheduled, before.order, inputs)
        return inputs

    def _begin(self, rows: Ints, index: Ints, new: Sequence[tuple[int, ...]]) -> bool:
        """Give each row its block at `index`, the next; False, with nothing done, if it is not."""
        if (
            list(map(len, new)) != [1] * len(rows)
            or np.count_nonzero(self._num_blocks[rows] != index)
            or index[index.argmax()] >= self._block_table.shape[1]
        ):
            return False
        self._block_table[rows, index] = [block_id for (block_id,) in new]
        self._num_blocks[rows] = index + 1
        return True

    def _gather(self, scheduled: StepRows, columns: _Columns, fresh: list[int]) -> StepInputs:
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
        first_slots = self._block_table[token_rows, blocks] * np.int64(self._block_size)
        samples, seq_lens = columns.samples[order], computed + counts
        sampling_rows, sampled_positions = rows[samples], seq_lens[samples]
        self._num_tokens[sampling_rows] += 1
        sampled = np.flatnonzero(positions >= self._num_given[token_rows])
        inputs = StepInputs(
            token_ids=self._token_ids[token_rows, positions].astype(np.int64),
            sampled_tokens=sampled,
            sampled_rows=token_rows[sampled],
            positions=positions,
            slot_mapping=first_slots + offsets,
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
        if len(sampling_rows) == len(positions) > 0:
            self._decoding = _Decoding(scheduled, order, inputs)
        return inputs

    def _sampling(self, rows: Ints, positions: Ints) -> SamplingRows:
        temperature = self._temperature[rows]
        return SamplingRows(
            draws=bool((temperature > 0).any()),
            temperature=temperature,
            top_k=self._top_k[rows],
            top_p=self._top_p[rows],
            min_p=self._min_p[rows],
            seeds=self._seeds[rows],
            positions=positions,
        )
