"""Decoding steps as graphs: captured once for each size, replayed without a launch by the host.

A graph reads its inputs where they lay when it was captured, so each step is copied there, padded
with rows that write to no slot and whose logits nobody reads. Sizes go up in buckets; the graphs
share their memory, as only one runs at a time. Engine thread.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
from cb_kernels import Rows
from torch import Tensor

from cb_backend.runtime.staging import StagedStep
from cb_backend.runtime.step_inputs import SamplingRows, StepInputs

Forward = Callable[[StagedStep], Tensor]

_NO_SLOT = -1


class GraphMaker(Protocol):
    def capture(self, run: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        """The replay of what `run` launches, and where each replay leaves its result."""
        ...


class CudaGraphMaker:
    """Its graphs share one pool of memory."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, run: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        run()  # what is compiled or set up at first use must not be captured
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = run()
        return graph.replay, result


class DecodeGraphs:
    """Graphs of steps with one token a row, all of which are sampled from."""

    def __init__(
        self,
        forward: Forward,
        maker: GraphMaker,
        *,
        max_num_seqs: int,
        max_blocks: int,  # of a row
        device: torch.device,
    ) -> None:
        self._forward = forward
        self._maker = maker
        self._sizes = bucket_sizes(max_num_seqs)
        self._step = _fixed_step(self._sizes[-1], max_blocks, device)
        self._graphs: dict[int, tuple[Callable[[], object], Tensor]] = {}

    def capture_all(self) -> None:
        """The largest first: the others then fit into its memory."""
        for size in reversed(self._sizes):
            self._graph(size)

    def forget(self) -> None:
        """The cache moved: every graph is captured anew when it is wanted."""
        self._graphs.clear()

    def padded(self, inputs: StepInputs) -> StepInputs | None:
        """The step at the size of its graph; None if there is no graph for such a step."""
        num_rows = len(inputs.seq_lens)
        if len(inputs.token_ids) != num_rows or len(inputs.logit_tokens) != num_rows:
            return None
        index = bisect.bisect_left(self._sizes, num_rows)
        if index == len(self._sizes):
            return None
        return _padded(inputs, self._sizes[index] - num_rows)

    def logits(self, step: StagedStep) -> Tensor:
        """Logits [R, V] of a padded step; the next replay of any graph overwrites them."""
        size = len(step.inputs.seq_lens)
        replay, logits = self._graph(size)
        to, rows, own = _first(self._step, size), step.rows, self._step.rows
        assert rows is not None
        assert own is not None
        table = own.block_table[:size, : rows.block_table.shape[1]]
        torch._foreach_copy_(
            [to.token_ids, to.positions, to.slot_mapping, own.seq_lens[:size], table],
            [step.token_ids, step.positions, step.slot_mapping, rows.seq_lens, rows.block_table],
        )
        replay()
        return logits[: len(step.inputs.request_ids)]

    def _graph(self, size: int) -> tuple[Callable[[], object], Tensor]:
        if size not in self._graphs:
            # Capturing runs it, on whatever the step before has left: let that write nothing, and
            # read no block that a smaller pool has no more.
            self._step.slot_mapping.fill_(_NO_SLOT)
            self._step.rows.seq_lens.fill_(1)
            self._step.rows.block_table.zero_()
            step = _first(self._step, size)
            self._graphs[size] = self._maker.capture(lambda: self._forward(step))
        return self._graphs[size]


def bucket_sizes(most: int) -> list[int]:
    """1, 2, 4, then multiples of 8, and `most`: a step is padded by 7 rows at most."""
    return [size for size in (1, 2, 4, *range(8, most, 8)) if size < most] + [most]


def _fixed_step(size: int, max_blocks: int, device: torch.device) -> StagedStep:
    """Inputs that stay where they are: rows of one token and one key, in no slot."""
    ids = np.zeros(size, np.int64)
    inputs = StepInputs(
        token_ids=ids,
        positions=ids.copy(),
        slot_mapping=np.full(size, _NO_SLOT, np.int64),
        query_start_loc=np.arange(size + 1, dtype=np.int32),
        seq_lens=np.ones(size, np.int32),
        block_table=np.zeros((size, max_blocks), np.int32),
        fresh_block_ids=[],
        sampled_tokens=_NOBODY,
        sampled_rows=_NOBODY,
        batch_rows=_NOBODY,
        logit_tokens=np.arange(size),
        request_ids=[],
        sampling=_NOT_SAMPLED,
    )

    def there(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(device)

    return StagedStep(
        inputs,
        there(inputs.token_ids),
        there(inputs.positions),
        there(inputs.slot_mapping),
        there(inputs.logit_tokens),
        # What was sampled is put into a step before it is copied here.
        there(_NOBODY),
        there(_NOBODY),
        there(_NOBODY),
        Rows(there(inputs.block_table), there(inputs.query_start_loc), there(inputs.seq_lens)),
    )


_NOBODY, _NOTHING = np.zeros(0, np.int64), np.zeros(0, np.float32)
_NOT_SAMPLED = SamplingRows(
    draws=False,
    temperature=_NOTHING,
    top_k=_NOBODY,
    top_p=_NOTHING,
    min_p=_NOTHING,
    seeds=_NOBODY.astype(np.uint64),
    positions=_NOBODY,
)


def _first(step: StagedStep, size: int) -> StagedStep:
    """The first rows of the step, in the same memory."""
    inputs = step.inputs
    return StagedStep(
        replace(
            inputs,
            token_ids=inputs.token_ids[:size],
            positions=inputs.positions[:size],
            slot_mapping=inputs.slot_mapping[:size],
            query_start_loc=inputs.query_start_loc[: size + 1],
            seq_lens=inputs.seq_lens[:size],
            block_table=inputs.block_table[:size],
            logit_tokens=inputs.logit_tokens[:size],
        ),
        step.token_ids[:size],
        step.positions[:size],
        step.slot_mapping[:size],
        step.logit_tokens[:size],
        step.sampled_tokens,
        step.sampled_rows,
        step.batch_rows,
        Rows(
            step.rows.block_table[:size],
            step.rows.query_start_loc[: size + 1],
            step.rows.seq_lens[:size],
        ),
    )


def _padded(inputs: StepInputs, count: int) -> StepInputs:
    """`count` more rows like those of `_fixed_step`; who samples stays as it is."""
    if count == 0:
        return inputs
    size = len(inputs.seq_lens) + count
    return replace(
        inputs,
        token_ids=_extended(inputs.token_ids, count, 0),
        positions=_extended(inputs.positions, count, 0),
        slot_mapping=_extended(inputs.slot_mapping, count, _NO_SLOT),
        query_start_loc=np.arange(size + 1),
        seq_lens=_extended(inputs.seq_lens, count, 1),
        block_table=np.pad(inputs.block_table, ((0, count), (0, 0))),
        logit_tokens=np.arange(size),
    )


def _extended(array: np.ndarray, count: int, value: int) -> np.ndarray:
    return np.concatenate((array, np.full(count, value, array.dtype)))
