"""What a row asks is gathered when it samples, and only then."""

from __future__ import annotations

import numpy as np
import pytest

from cb_backend.core.sampling_params import SamplingParams
from cb_backend.core.step_io import Admission
from cb_backend.runtime.row_edits import EditedRows, RowEdits, tokens_in

VOCAB_SIZE = 70
EOS = 9


def edits_of(*asked: SamplingParams, prompt: int = 3, output: tuple[int, ...] = ()) -> RowEdits:
    """Row after row, each with a prompt of so many tokens and an output."""
    edits = RowEdits(vocab_size=VOCAB_SIZE, eos_token_ids=(EOS, VOCAB_SIZE + 5))
    token_ids = (*range(30, 30 + prompt), *output)
    for row, params in enumerate(asked):
        admission = Admission(f"{row}", token_ids, prompt, 0, params, 0)
        edits.admit(row, admission, np.array(token_ids, np.int32))
    return edits


def gather(edits: RowEdits, rows: list[int], positions: list[int]) -> EditedRows | None:
    return edits.gather(np.array(rows, np.int64), np.array(positions, np.int64))


def biases(edited: EditedRows, place: int = 0) -> dict[int, float]:
    pairs = zip(edited.bias_ids[place].tolist(), edited.bias_values[place].tolist(), strict=True)
    return {token_id: value for token_id, value in pairs if token_id >= 0}


def test_rows_that_ask_for_nothing_give_nothing() -> None:
    edits = edits_of(SamplingParams(), SamplingParams(temperature=0.5, top_k=3))
    assert gather(edits, [0, 1], [3, 3]) is None
    edits = edits_of(SamplingParams(), SamplingParams(presence_penalty=1.0))
    assert gather(edits, [0], [3]) is None, "who asks does not sample"
    assert gather(edits, [], []) is None


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(presence_penalty=-0.5),
        SamplingParams(frequency_penalty=0.5),
        SamplingParams(repetition_penalty=1.5),
    ],
    ids=["presence", "frequency", "repetition"],
)
def test_each_penalty_alone_is_one(params: SamplingParams) -> None:
    edited = gather(edits_of(SamplingParams(), params), [1, 0], [3, 3])
    assert edited is not None
    assert edited.penalized.tolist() == [True]
    assert (edited.index.tolist(), edited.batch_rows.tolist()) == ([0], [1])
    assert edited.presence.tolist() == [params.presence_penalty]
    assert edited.frequency.tolist() == [params.frequency_penalty]
    assert edited.repetition.tolist() == [params.repetition_penalty]


def test_counting_begins_with_the_first_token_after_an_admission() -> None:
    params = SamplingParams(presence_penalty=1.0)
    edits = edits_of(SamplingParams(), params, prompt=2, output=(69, 5, 69))
    first = gather(edits, [0, 1], [5, 5])
    assert first is not None
    assert first.first_rows.tolist() == [1]
    assert (first.given_tokens - VOCAB_SIZE).tolist() == [69, 5, 69]
    assert first.first_prompts.shape == (1, 3)
    assert tokens_in(first.first_prompts[0]).tolist() == [30, 31]
    later = gather(edits, [0, 1], [6, 6])
    assert later is not None
    assert (len(later.first_rows), len(later.first_prompts), len(later.given_tokens)) == (0, 0, 0)


def test_no_end_is_drawn_before_min_tokens_also_one_that_is_ignored() -> None:
    params = SamplingParams(
        min_tokens=2, stop_token_ids=(4, 5), logit_bias={4: 100.0, 6: 1.0}, ignore_eos=True
    )
    edits = edits_of(params)
    for position in (3, 4):
        edited = gather(edits, [0], [position])
        assert edited is not None
        assert not edited.penalized.any()
        assert biases(edited) == {4: -np.inf, 5: -np.inf, EOS: -np.inf, 6: 1.0}
    edited = gather(edits, [0], [5])
    assert edited is not None
    assert biases(edited) == {4: 100.0, 6: 1.0}


def test_a_row_that_asked_for_min_tokens_alone_asks_no_more() -> None:
    edits = edits_of(SamplingParams(min_tokens=2))
    assert gather(edits, [0], [4]) is not None
    assert gather(edits, [0], [5]) is None


def test_rows_of_few_and_of_many_biases_are_gathered_together() -> None:
    many = {token_id: float(token_id) for token_id in range(20)}
    edits = edits_of(SamplingParams(logit_bias=many), SamplingParams(logit_bias={7: -1.0}))
    edited = gather(edits, [1, 0], [3, 3])
    assert edited is not None
    assert (biases(edited, 0), biases(edited, 1)) == ({7: -1.0}, many)
    assert edited.bias_ids.shape == (2, 32)


def test_a_row_that_was_retired_asks_for_nothing() -> None:
    edits = edits_of(SamplingParams(presence_penalty=1.0))
    edits.retire(0)
    assert gather(edits, [0], [3]) is None
