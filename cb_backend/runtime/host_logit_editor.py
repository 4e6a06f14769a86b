"""Biases and penalties on a CPU, by the few tokens that a row has seen. Engine thread."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from cb_backend.runtime.row_edits import EditedRows, Floats, tokens_in
from cb_backend.runtime.staging import StagedStep


class HostLogitEditor:
    """Implements `logit_editor.LogitEditor`. What is counted has the size of the texts, not of the
    vocabulary; a step with an edited row copies its logits to float32."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        # Of each row of the batch that is penalized: how often it has generated which token; of
        # one that only its prompt has, 0 times.
        self._counts: dict[int, dict[int, int]] = {}

    def edit(self, logits: Tensor, step: StagedStep) -> Tensor:
        """See `LogitEditor.edit`."""
        if (edits := step.inputs.edits) is None:
            return logits
        self._begin(edits)
        edited = logits.float()
        rows: Floats = edited.numpy()
        # What is not finite makes its row unsound, and the sampler says so.
        with np.errstate(invalid="ignore", over="ignore"):
            for place, index in enumerate(edits.index.tolist()):
                ids = edits.bias_ids[place]
                rows[index, ids[ids >= 0]] += edits.bias_values[place][ids >= 0]
                if edits.penalized[place]:
                    self._penalize(rows[index], edits, place)
        return edited

    def count(self, step: StagedStep, token_ids: Tensor, sound: Tensor) -> None:
        """See `LogitEditor.count`."""
        if (edits := step.inputs.edits) is None:
            return
        tokens, is_sound = token_ids.tolist(), sound.tolist()
        for place in np.flatnonzero(edits.penalized).tolist():
            index = int(edits.index[place])
            if is_sound[index]:
                self._add(int(edits.batch_rows[place]), tokens[index])

    def _begin(self, edits: EditedRows) -> None:
        repetition = dict(zip(edits.batch_rows.tolist(), edits.repetition.tolist(), strict=True))
        for row, prompt in zip(edits.first_rows.tolist(), edits.first_prompts, strict=True):
            # Only a repetition's penalty asks for the prompt, which may be long.
            seen = tokens_in(prompt).tolist() if repetition[row] != 1.0 else ()
            self._counts[row] = dict.fromkeys(seen, 0)
        for place in edits.given_tokens.tolist():
            self._add(*divmod(place, self._vocab_size))

    def _penalize(self, logits: Floats, edits: EditedRows, place: int) -> None:
        seen = self._counts[int(edits.batch_rows[place])]
        ids = np.fromiter(seen, np.int64, len(seen))
        counts = np.fromiter(seen.values(), np.float32, len(seen))
        before, repetition = logits[ids], edits.repetition[place]
        after = np.where(before > 0, before / repetition, before * repetition)
        after -= edits.frequency[place] * counts
        logits[ids] = after - edits.presence[place] * (counts > 0)

    def _add(self, row: int, token_id: int) -> None:
        counts = self._counts[row]
        counts[token_id] = counts.get(token_id, 0) + 1
