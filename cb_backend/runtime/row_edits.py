"""What the rows of the batch ask to be done to their logits: biases, penalties, banned tokens.

How often a token has been there is counted where a row's last one is known: by `logit_editor.py`
or `host_logit_editor.py`. Engine thread. Host memory only (numpy).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cb_backend.core.step_io import Admission

Ints = npt.NDArray[np.int64]
Ints32 = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]
Biases = tuple[Ints32, Floats]  # token ids, distinct, and what is added to their logits

# Less would take a logit past float32's range, and gives the same order of tokens.
_LEAST_REPETITION = 1e-6
# Rows are padded to as many biases: the GPU's kernel is then compiled once, and not for each count.
_BIASES_ARE_MULTIPLES_OF = 16


@dataclass(frozen=True, slots=True)
class EditedRows:
    """Of a step's R sampling rows the E whose logits are edited, in one order.

    F of them are penalized and sample for the first time since their admission. What is counted of
    those begins here: with their prompts, and with the N tokens that they had generated before.
    """

    index: Ints  # [E], which of the R
    batch_rows: Ints  # [E]
    penalized: npt.NDArray[np.bool_]  # [E], else only the biases matter
    bias_ids: Ints32  # [E, B], -1 for none
    bias_values: Floats  # [E, B]
    repetition: Floats  # [E]
    presence: Floats  # [E]
    frequency: Floats  # [E]
    first_rows: Ints  # [F], rows of the batch
    first_prompts: Ints32  # [F, ceil(V / 32)], bit i % 32 of word i // 32 for token i
    given_tokens: Ints  # [N], each as row of the batch * V + token id


class RowEdits:
    """Raises nothing: the ids that clients name are below `vocab_size`."""

    def __init__(self, *, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._vocab_size = vocab_size
        self._eos_token_ids = [token_id for token_id in eos_token_ids if token_id < vocab_size]
        self._rows: dict[int, _EditedRow] = {}  # only those that ask for something

    def admit(self, row: int, admission: Admission, token_ids: Ints32) -> None:
        """The batch's row is this request's from now on; `token_ids` are the admission's."""
        params = admission.params
        if params.penalizes or params.logit_bias or params.min_tokens:
            self._rows[row] = self._edited_row(row, admission, token_ids.astype(np.int64))

    def retire(self, row: int) -> None:
        self._rows.pop(row, None)

    def gather(self, rows: Ints, positions: Ints) -> EditedRows | None:
        """Of rows [R] that sample the tokens at `positions` [R]; None if nothing is edited."""
        if not self._rows:
            return None
        places = enumerate(zip(rows.tolist(), positions.tolist(), strict=True))
        found = [
            (index, edited, position)
            for index, (row, position) in places
            if (edited := self._rows.get(row)) is not None and edited.asks_at(position)
        ]
        if not found:
            return None
        edited_rows = [edited for _, edited, _ in found]
        firsts = [edited for _, edited, position in found if edited.begins_at(position)]
        bias_ids, bias_values = _padded([edited.biases_at(at) for _, edited, at in found])
        prompts = np.array([edited.prompt for edited in firsts], np.int32)
        return EditedRows(
            index=np.array([index for index, _, _ in found]),
            batch_rows=np.array([edited.row for edited in edited_rows]),
            penalized=np.array([edited.penalized for edited in edited_rows]),
            bias_ids=bias_ids,
            bias_values=bias_values,
            repetition=np.array([edited.repetition for edited in edited_rows], np.float32),
            presence=np.array([edited.presence for edited in edited_rows], np.float32),
            frequency=np.array([edited.frequency for edited in edited_rows], np.float32),
            first_rows=np.array([edited.row for edited in firsts], np.int64),
            first_prompts=prompts.reshape(len(firsts), num_mask_words(self._vocab_size)),
            given_tokens=np.concatenate([_NO_TOKENS, *(edited.given for edited in firsts)]),
        )

    def _edited_row(self, row: int, admission: Admission, token_ids: Ints) -> _EditedRow:
        params, num_prompt = admission.params, admission.num_prompt_tokens
        # As vLLM has it, no end of text either that `ignore_eos` would let pass.
        banned = dict.fromkeys((*params.stop_token_ids, *self._eos_token_ids), -np.inf)
        return _EditedRow(
            row=row,
            biases=_biases(params.logit_bias),
            early_biases=_biases({**params.logit_bias, **banned}),
            early_end=num_prompt + params.min_tokens,
            penalized=params.penalizes,
            repetition=max(params.repetition_penalty, _LEAST_REPETITION),
            presence=params.presence_penalty,
            frequency=params.frequency_penalty,
            num_given=len(token_ids),
            prompt=_mask(token_ids[:num_prompt], self._vocab_size),
            given=row * self._vocab_size + token_ids[num_prompt:],
        )


@dataclass(frozen=True, slots=True)
class _EditedRow:
    """One request's wishes, and what of it was known at its admission."""

    row: int
    biases: Biases
    early_biases: Biases  # for tokens before position `early_end`
    early_end: int
    penalized: bool
    repetition: float
    presence: float
    frequency: float
    num_given: int  # tokens that came with the admission
    prompt: Ints32  # the mask of `EditedRows.first_prompts`
    given: Ints  # `EditedRows.given_tokens`

    def asks_at(self, position: int) -> bool:
        return self.penalized or len(self.biases_at(position)[0]) > 0

    def begins_at(self, position: int) -> bool:
        return self.penalized and position == self.num_given

    def biases_at(self, position: int) -> Biases:
        return self.early_biases if position < self.early_end else self.biases


_NO_TOKENS = np.zeros(0, np.int64)


def num_mask_words(vocab_size: int) -> int:
    return -(-vocab_size // 32)


def _biases(bias_of: Mapping[int, float]) -> Biases:
    return np.array(list(bias_of), np.int32), np.array(list(bias_of.values()), np.float32)


def _padded(biases: Sequence[Biases]) -> Biases:
    """All rows' biases as [E, B], with -1 for no id."""
    longest = max(len(ids) for ids, _ in biases)
    width = -(-longest // _BIASES_ARE_MULTIPLES_OF) * _BIASES_ARE_MULTIPLES_OF
    all_ids = np.full((len(biases), width), -1, np.int32)
    all_values = np.zeros((len(biases), width), np.float32)
    for row, (ids, values) in enumerate(biases):
        all_ids[row, : len(ids)] = ids
        all_values[row, : len(values)] = values
    return all_ids, all_values


def tokens_in(mask: Ints32) -> Ints:
    """The ids whose bits are set in words [W]."""
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))


def _mask(token_ids: Ints, vocab_size: int) -> Ints32:
    """A bit per token of the vocabulary, set for these."""
    bits = np.zeros(32 * num_mask_words(vocab_size), np.bool_)
    bits[token_ids] = True
    return np.packbits(bits, bitorder="little").view("<i4")
