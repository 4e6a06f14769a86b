"""The persistent batch gathers what the plan says and refuses what cannot be."""

from __future__ import annotations

import pytest

from cb_backend.core.sampling_params import SamplingParams
from cb_backend.core.step_io import Admission, ScheduledRow, StepPlan, StepRows
from cb_backend.errors import InternalError
from cb_backend.runtime.step_inputs import StepInputs
from cb_backend.runtime.token_batch import TokenBatch


def batch_of(max_num_seqs: int = 3) -> TokenBatch:
    return TokenBatch(max_num_seqs=max_num_seqs, max_model_len=20, block_size=4, vocab_size=100)


def admission(request_id: str, token_ids: range, seed: int = 0) -> Admission:
    return Admission(request_id, tuple(token_ids), len(token_ids), 0, SamplingParams(), seed)


def apply(
    batch: TokenBatch,
    *rows: ScheduledRow,
    admitted: tuple[Admission, ...] = (),
    retired: tuple[str, ...] = (),
) -> StepInputs:
    return batch.apply(StepPlan(0, retired, admitted, StepRows.of(*rows)))


def test_inputs_are_ragged_with_single_tokens_first_and_longest_first() -> None:
    batch = batch_of()
    apply(
        batch,
        ScheduledRow("a", 0, 2, (7,), False),
        ScheduledRow("b", 0, 6, (5, 2), True),
        admitted=(admission("a", range(10, 16)), admission("b", range(20, 26), seed=-1)),
    )
    inputs = apply(
        batch,
        ScheduledRow("a", 2, 4, (1,), True),
        ScheduledRow("b", 6, 1, (), True),
        ScheduledRow("c", 0, 1, (3,), True),
        admitted=(admission("c", range(30, 31)),),
    )
    assert inputs.sampled_tokens.tolist() == [0]
    assert inputs.sampled_rows.tolist() == [1], "the second that was admitted"
    assert inputs.token_ids.tolist()[1:] == [30, 12, 13, 14, 15]
    assert inputs.positions.tolist() == [6, 0, 2, 3, 4, 5]
    assert inputs.slot_mapping.tolist() == [2 * 4 + 2, 3 * 4, 7 * 4 + 2, 7 * 4 + 3, 4, 5]
    assert inputs.query_start_loc.tolist() == [0, 1, 2, 6]
    assert inputs.seq_lens.tolist() == [7, 1, 6]
    assert inputs.block_table[0].tolist() == [5, 2]
    assert inputs.request_ids == ["b", "c", "a"]
    assert inputs.logit_tokens.tolist() == [0, 1, 5]
    assert inputs.sampling.positions.tolist() == [7, 1, 6]
    assert int(inputs.sampling.seeds[0]) == 2**64 - 1
    assert inputs.fresh_block_ids == [1, 3]


def test_blocks_that_hold_a_shared_prefix_are_not_fresh() -> None:
    batch = batch_of()
    shared = Admission("a", tuple(range(10)), 10, 4, SamplingParams(), 0)
    inputs = apply(batch, ScheduledRow("a", 4, 5, (8, 9, 1), False), admitted=(shared,))
    assert inputs.fresh_block_ids == [9, 1]


def test_a_block_partly_computed_is_not_fresh() -> None:
    batch = batch_of()
    copied = Admission("a", tuple(range(10)), 10, 6, SamplingParams(), 0)
    inputs = apply(batch, ScheduledRow("a", 6, 4, (8, 9, 1), True), admitted=(copied,))
    assert inputs.fresh_block_ids == [1]


def test_rows_are_reused_and_nothing_of_their_past_is_left() -> None:
    batch = batch_of(max_num_seqs=1)
    for round_ in range(3):
        request_id = f"r{round_}"
        inputs = apply(
            batch,
            ScheduledRow(request_id, 0, 3, (round_,), True),
            admitted=(admission(request_id, range(5 * round_, 5 * round_ + 3)),),
            retired=(f"r{round_ - 1}",),
        )
        assert inputs.token_ids.tolist() == list(range(5 * round_, 5 * round_ + 3))
        assert inputs.block_table.tolist() == [[round_]]
    assert len(batch) == 1


def test_a_token_past_a_full_context_is_counted_but_not_kept() -> None:
    batch = batch_of()
    apply(
        batch,
        ScheduledRow("a", 0, 20, (0, 1, 2, 3, 4), True),
        admitted=(admission("a", range(20)),),
    )
    with pytest.raises(InternalError, match="21 computed tokens, with 21 known and 5 blocks"):
        apply(batch, ScheduledRow("a", 20, 1, (), True))


def test_plans_that_do_not_fit_are_refused() -> None:
    batch = batch_of(max_num_seqs=1)
    with pytest.raises(InternalError, match="never admitted"):
        apply(batch, ScheduledRow("a", 0, 1, (0,), True))
    with pytest.raises(InternalError, match="21 tokens"):
        apply(batch, admitted=(admission("a", range(21)),))
    apply(batch, ScheduledRow("a", 0, 3, (0,), False), admitted=(admission("a", range(3)),))
    with pytest.raises(InternalError, match="no row is free"):
        apply(batch, admitted=(admission("b", range(3)),))
    with pytest.raises(InternalError, match="4 computed tokens, with 3 known"):
        apply(batch, ScheduledRow("a", 3, 1, (), True))
    apply(batch, retired=("a", "unknown"))
    with pytest.raises(InternalError, match="1 blocks of 4"):
        apply(batch, ScheduledRow("a", 0, 5, (0,), True), admitted=(admission("a", range(6)),))


def test_a_sampled_token_that_is_not_the_last_cannot_be_computed() -> None:
    batch = batch_of()
    prompt = ScheduledRow("a", 0, 3, (0,), True)
    apply(batch, prompt, admitted=(admission("a", range(3)),))
    apply(batch, ScheduledRow("a", 3, 1, (), True))
    with pytest.raises(InternalError, match="needs more than its last sampled token"):
        apply(batch, ScheduledRow("a", 3, 2, (1,), True))
