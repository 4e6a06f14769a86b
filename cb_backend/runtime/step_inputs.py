"""A step's rows and tokens as arrays: what the persistent batch gathers for the device to read.

Host memory (numpy). Nobody writes to them: a step may share arrays with the one before.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cb_backend.runtime.row_edits import EditedRows, Ints


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """What the sampler needs of the R rows that sample, in one order."""

    draws: bool  # whether any of them does: its temperature is above 0
    temperature: npt.NDArray[np.float32]  # [R]
    top_k: Ints  # [R], 0 for all of the vocabulary
    top_p: npt.NDArray[np.float32]
    min_p: npt.NDArray[np.float32]
    seeds: npt.NDArray[np.uint64]
    positions: Ints  # [R], where in its sequence the sampled token will stand

    def at(self, positions: Ints) -> SamplingRows:
        """The same rows, elsewhere in their sequences."""
        return SamplingRows(
            *(self.draws, self.temperature, self.top_k, self.top_p, self.min_p, self.seeds),
            positions,
        )


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
