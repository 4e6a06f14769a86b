"""A step's inputs where the model runs. Engine thread."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from cb_kernels import Rows, SamplingParameters
from torch import Tensor

from cb_backend.runtime.row_edits import EditedRows
from cb_backend.runtime.step_inputs import SamplingRows, StepInputs
from cb_backend.runtime.streams import Streams


@dataclass(frozen=True, slots=True)
class StagedEdits:
    """What of `EditedRows` the device reads."""

    penalized: bool  # whether any row is
    num_rows: int  # of the batch, up to the last that is edited
    index: Tensor  # [E] int64
    batch_rows: Tensor  # [E] int64
    bias_ids: Tensor  # [E, B] int32
    bias_values: Tensor  # [E, B] float32
    repetition: Tensor  # [E] float32
    presence: Tensor
    frequency: Tensor
    first_rows: Tensor  # [F] int64
    first_prompts: Tensor  # [F, ceil(V / 32)] int32
    given_tokens: Tensor  # [N] int64


@dataclass(frozen=True, slots=True)
class StagedStep:
    """`inputs`, and what of them the device reads; for Triton also how to sample, and which logits
    to edit before."""

    inputs: StepInputs
    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    slot_mapping: Tensor  # [T] int64
    logit_tokens: Tensor  # [R] int64
    # [K], [K] and [R] int64: see `StepInputs`, for `SampledIds`.
    sampled_tokens: Tensor
    sampled_rows: Tensor
    batch_rows: Tensor
    rows: Rows
    sampling: SamplingParameters | None = None
    for_graph: bool = False  # padded, see `cuda_graphs`
    edits: StagedEdits | None = None


def stage(
    inputs: StepInputs, streams: Streams, *, for_triton: bool, for_graph: bool = False
) -> StagedStep:
    """All that the device needs, handed over in one go."""
    tokens = {
        "token_ids": inputs.token_ids,
        "positions": inputs.positions,
        "slot_mapping": inputs.slot_mapping,
        "logit_tokens": inputs.logit_tokens,
        "sampled_tokens": inputs.sampled_tokens,
        "sampled_rows": inputs.sampled_rows,
        "batch_rows": inputs.batch_rows,
    }
    rows = _rows(inputs)
    sampling = _sampling(inputs.sampling) if for_triton else {}
    rows_to_edit = inputs.edits if for_triton else None
    edits = {} if rows_to_edit is None else _edits(rows_to_edit)
    there = streams.upload(tokens | rows | sampling | edits)
    return StagedStep(
        inputs,
        there["token_ids"],
        there["positions"],
        there["slot_mapping"],
        there["logit_tokens"],
        there["sampled_tokens"],
        there["sampled_rows"],
        there["batch_rows"],
        Rows(*(there[name] for name in rows)),
        SamplingParameters(*(there[name] for name in sampling)) if for_triton else None,
        for_graph,
        None if rows_to_edit is None else _staged_edits(rows_to_edit, there),
    )


def _rows(inputs: StepInputs) -> dict[str, np.ndarray]:
    """In the order of `Rows`."""
    return {
        "block_table": inputs.block_table,
        "query_start_loc": inputs.query_start_loc.astype(np.int32),
        "seq_lens": inputs.seq_lens.astype(np.int32),
    }


def _sampling(rows: SamplingRows) -> dict[str, np.ndarray]:
    """In the order of `SamplingParameters`."""
    return {
        "temperature": rows.temperature,
        "top_k": rows.top_k,
        "top_p": rows.top_p,
        "min_p": rows.min_p,
        "seeds": rows.seeds.view(np.int64),
        # Not "positions": those are the tokens'.
        "sampled_positions": rows.positions,
    }


def _edits(rows: EditedRows) -> dict[str, np.ndarray]:
    """In the order of `StagedEdits`, under names that no other array of a step has."""
    return {
        "edit_index": rows.index,
        "edit_batch_rows": rows.batch_rows,
        "edit_bias_ids": rows.bias_ids,
        "edit_bias_values": rows.bias_values,
        "edit_repetition": rows.repetition,
        "edit_presence": rows.presence,
        "edit_frequency": rows.frequency,
        "edit_first_rows": rows.first_rows,
        "edit_first_prompts": rows.first_prompts,
        "edit_given_tokens": rows.given_tokens,
    }


def _staged_edits(rows: EditedRows, there: Mapping[str, Tensor]) -> StagedEdits:
    num_rows = int(rows.batch_rows.max()) + 1
    return StagedEdits(
        bool(rows.penalized.any()), num_rows, *(there[name] for name in _edits(rows))
    )
