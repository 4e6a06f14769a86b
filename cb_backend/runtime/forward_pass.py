"""One forward pass over a step's rows, in the way that the model and the config ask for.

In a deterministic engine a token's logits have the same bits whatever shares its step and however
its sequence was cut. Where a model's operations do not see to that themselves, its tokens go
through it one at a time: each operation's shapes then depend on the token's own sequence alone.
Engine thread.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from cb_kernels import RaggedBatch, Workspace, uses_triton
from torch import Tensor

from cb_backend.runtime.attention import StepAttention
from cb_backend.runtime.cuda_graphs import DecodeGraphs, GraphMaker
from cb_backend.runtime.kv_cache import KVCache
from cb_backend.runtime.models.interface import CausalModel, ModelRun
from cb_backend.runtime.staging import StagedStep, stage
from cb_backend.runtime.step_inputs import StepInputs
from cb_backend.runtime.streams import Streams

logger = logging.getLogger(__name__)


class ForwardPass:
    """Raises nothing of its own: what is asked of it was checked before."""

    def __init__(
        self, model: CausalModel, cache: KVCache, streams: Streams, *, deterministic: bool
    ) -> None:
        self._model = model
        self._cache = cache
        self._streams = streams
        self._workspace = Workspace()
        self._for_triton = uses_triton(cache.pool)
        self._deterministic = deterministic
        self._by_token = deterministic and not model.is_batch_invariant(paged=cache.is_paired)
        self.can_prepare = model.can_prepare and cache.is_paired and not self._by_token
        self._graphs: DecodeGraphs | None = None
        if deterministic:
            way = "one at a time" if self._by_token else "in batches"
            logger.info("deterministic: tokens go through the model %s", way)

    def use_graphs(self, maker: GraphMaker, *, max_num_seqs: int, max_model_len: int) -> None:
        """Capture decoding steps, where the model can be captured."""
        if self._by_token or not self._model.is_capturable:
            logger.info("CUDA graphs: none, since the model's steps cannot be captured")
            return
        max_blocks = -(-max_model_len // self._cache.block_size)
        self._graphs = DecodeGraphs(
            lambda step: self._run(step, max_keys=max_model_len),
            maker,
            max_num_seqs=max_num_seqs,
            max_blocks=max_blocks,
            device=self._cache.pool.device,
        )
        self._graphs.capture_all()

    def close(self) -> None:
        """Let go of the graphs, and they of the model and the cache."""
        self.forget_graphs()
        self._graphs = None

    def forget_graphs(self) -> None:
        """Before the cache moves."""
        if self._graphs is not None:
            self._graphs.forget()

    def stage(self, inputs: StepInputs) -> StagedStep:
        """Hand the step's inputs over to the device."""
        # The kernels in C and in Triton read no slot that its row has not written.
        if inputs.fresh_block_ids and not (self._cache.is_paired or self._for_triton):
            self._cache.clear(inputs.fresh_block_ids)
        padded = None if self._graphs is None else self._graphs.padded(inputs)
        if padded is None:
            return self._stage(inputs)
        return self._stage(padded, for_graph=True)

    def logits(self, step: StagedStep) -> Tensor:
        """Logits [R, V] of the step's tokens that are sampled from."""
        if step.for_graph and self._graphs is not None:
            return self._graphs.logits(step)
        if not self._by_token:
            return self._run(step)
        # Their ids from the step itself: what the one before it has sampled is only there.
        logits = []
        for token, one in enumerate(one_by_one(step.inputs)):
            ids = step.token_ids[token : token + 1]
            logits.append(self._run(replace(self._stage(one), token_ids=ids)))
        return torch.cat(logits)

    def prepare(self, step: StagedStep, *, only_best: bool) -> ModelRun:
        """See `CausalModel.prepare`; only where it `can_prepare`."""
        attention, wanted = self._attention(step), step.logit_tokens
        return self._model.prepare(step.token_ids, attention, wanted, only_best=only_best)

    def _stage(self, inputs: StepInputs, *, for_graph: bool = False) -> StagedStep:
        return stage(inputs, self._streams, for_triton=self._for_triton, for_graph=for_graph)

    def _run(self, step: StagedStep, *, max_keys: int | None = None) -> Tensor:
        attention = self._attention(step, max_keys=max_keys)
        return self._model.forward(step.token_ids, step.positions, attention, step.logit_tokens)

    def _attention(self, step: StagedStep, *, max_keys: int | None = None) -> StepAttention:
        inputs = step.inputs
        batch = RaggedBatch(
            block_table=torch.from_numpy(inputs.block_table),
            query_start_loc=inputs.query_start_loc.tolist(),
            seq_lens=inputs.seq_lens.tolist(),
            block_size=self._cache.block_size,
            device=self._cache.pool.device,
            workspace=self._workspace,
            on_device=step.rows,
            max_keys=max_keys,
            # On the CPU only Triton knows of it; the others are so where `is_batch_invariant`.
            deterministic=self._deterministic and self._for_triton,
        )
        return StepAttention(self._cache, batch, step.slot_mapping)


def one_by_one(inputs: StepInputs) -> Iterator[StepInputs]:
    """A step for each token, in their order: a token wants the K and V of those before."""
    sampled = set(inputs.logit_tokens.tolist())
    rows = np.repeat(np.arange(len(inputs.seq_lens)), np.diff(inputs.query_start_loc))
    for token, row in enumerate(rows.tolist()):
        own = slice(token, token + 1)
        seq_len = inputs.positions[own] + 1
        yield replace(
            inputs,
            token_ids=inputs.token_ids[own],
            positions=inputs.positions[own],
            slot_mapping=inputs.slot_mapping[own],
            query_start_loc=np.array([0, 1]),
            seq_lens=seq_len,
            block_table=inputs.block_table[row : row + 1],
            logit_tokens=np.zeros(int(token in sampled), np.int64),
            edits=None,  # they are of the whole step's logits
        )
