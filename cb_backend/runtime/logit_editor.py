"""Biases and penalties where the logits and the sampled tokens are. Engine thread.

A step in flight has sampled tokens that the host has not seen. So what a row has generated is
counted on the device, in the order of the steps, and nothing waits. What a row's earlier owner or
a step that was computed in vain has left there is overwritten when the next owner first samples.
"""

from __future__ import annotations

from typing import Protocol

import cb_kernels
import torch
from cb_kernels import LogitEdits
from torch import Tensor

from cb_backend.runtime.row_edits import num_mask_words
from cb_backend.runtime.staging import StagedEdits, StagedStep


class LogitEditor(Protocol):
    """Edits the rows that ask for it, in the order bias, repetition, frequency, presence."""

    def edit(self, logits: Tensor, step: StagedStep) -> Tensor:
        """Of the step's logits [R, V] those to sample from, in float32 if any are edited; the ones
        given may be overwritten."""
        ...

    def count(self, step: StagedStep, token_ids: Tensor, sound: Tensor) -> None:
        """What the step's rows [R] have sampled; of an unsound one the id means nothing."""
        ...


class DeviceLogitEditor:
    """Implements `LogitEditor` by a kernel. Takes memory when a row is first penalized, and for
    the batch's rows up to twice the last that ever was, at most for all."""

    def __init__(self, vocab_size: int, max_num_seqs: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._max_num_seqs = max_num_seqs
        self._device = device
        # Of row after row of the batch: how often it has generated each token, and its prompt.
        self._counts = self._zeros(0, vocab_size)  # [G, V]
        self._prompts = self._zeros(0, num_mask_words(vocab_size))  # [G, ceil(V / 32)]

    def edit(self, logits: Tensor, step: StagedStep) -> Tensor:
        """See `LogitEditor.edit`."""
        if (edits := step.edits) is None:
            return logits
        if edits.penalized:
            self._begin(edits)
        chosen = logits.index_select(0, edits.index)
        edited = cb_kernels.edit_logits(chosen, self._wanted(edits))
        return logits.float().index_copy_(0, edits.index, edited)

    def count(self, step: StagedStep, token_ids: Tensor, sound: Tensor) -> None:
        """See `LogitEditor.count`."""
        if (edits := step.edits) is not None and edits.penalized:
            sound = sound.index_select(0, edits.index)
            tokens = token_ids.index_select(0, edits.index).masked_fill(~sound, 0)
            self._add(edits.batch_rows * self._vocab_size + tokens, sound.int())

    def _begin(self, edits: StagedEdits) -> None:
        if (missing := edits.num_rows - len(self._counts)) > 0:
            # Doubled, as each growth copies all.
            more = min(2 * len(self._counts), self._max_num_seqs) - len(self._counts)
            more = max(missing, more)
            self._counts = torch.cat((self._counts, self._zeros(more, self._vocab_size)))
            self._prompts = torch.cat((self._prompts, self._zeros(more, self._prompts.shape[1])))
        self._counts.index_fill_(0, edits.first_rows, 0)
        self._prompts.index_copy_(0, edits.first_rows, edits.first_prompts)
        self._add(edits.given_tokens, torch.ones_like(edits.given_tokens, dtype=torch.int32))

    def _wanted(self, edits: StagedEdits) -> LogitEdits:
        bias = (edits.bias_ids, edits.bias_values) if edits.bias_ids.shape[1] else None
        if not edits.penalized:
            return LogitEdits(bias=bias)
        # A row that is not penalized has whatever was counted there before, with no weight.
        return LogitEdits(
            bias=bias,
            counts=self._counts.index_select(0, edits.batch_rows),
            prompt=self._prompts.index_select(0, edits.batch_rows),
            repetition=edits.repetition,
            presence=edits.presence,
            frequency=edits.frequency,
        )

    def _add(self, places: Tensor, numbers: Tensor) -> None:
        """At row * V + token id."""
        self._counts.view(-1).scatter_add_(0, places, numbers)

    def _zeros(self, num_rows: int, width: int) -> Tensor:
        return torch.zeros(num_rows, width, dtype=torch.int32, device=self._device)
