"""A step's inputs where the model runs. Engine thread."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from cb_kernels import Rows, SamplingParameters
from torch import Tensor

from cb_backend.runtime.streams import Streams
from cb_backend.runtime.token_batch import SamplingRows, StepInputs


@dataclass(frozen=True, slots=True)
class StagedStep:
    """`inputs`, and what of them the device reads; for Triton also the rows and how to sample."""

    inputs: StepInputs
    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    slot_mapping: Tensor  # [T] int64
    logit_tokens: Tensor  # [R] int64
    # [K], [K] and [R] int64: see `StepInputs`, for `SampledIds`.
    sampled_tokens: Tensor
    sampled_rows: Tensor
    batch_rows: Tensor
    rows: Rows | None = None
    sampling: SamplingParameters | None = None
    for_graph: bool = False  # padded, see `cuda_graphs`


def stage(
    inputs: StepInputs, streams: Streams, *, for_triton: bool, for_graph: bool = False
) -> StagedStep:
    """All that the device needs, handed over in one go."""
    has_rows = for_triton or for_graph
    tokens = {
        "token_ids": inputs.token_ids,
        "positions": inputs.positions,
        "slot_mapping": inputs.slot_mapping,
        "logit_tokens": inputs.logit_tokens,
        "sampled_tokens": inputs.sampled_tokens,
        "sampled_rows": inputs.sampled_rows,
        "batch_rows": inputs.batch_rows,
    }
    rows = _rows(inputs) if has_rows else {}
    sampling = _sampling(inputs.sampling) if for_triton else {}
    there = streams.upload(tokens | rows | sampling)
    return StagedStep(
        inputs,
        there["token_ids"],
        there["positions"],
        there["slot_mapping"],
        there["logit_tokens"],
        there["sampled_tokens"],
        there["sampled_rows"],
        there["batch_rows"],
        Rows(*(there[name] for name in rows)) if has_rows else None,
        SamplingParameters(*(there[name] for name in sampling)) if for_triton else None,
        for_graph,
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
