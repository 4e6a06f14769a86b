"""What was sampled is where the next step looks for it, and reaches the host."""

from __future__ import annotations

import torch

from cb_backend.core.sampling_params import SamplingParams
from cb_backend.core.step_io import Admission, ScheduledRow, StepPlan
from cb_backend.runtime.sampled_ids import HostCopy, SampledIds, SampledStep
from cb_backend.runtime.token_batch import StepInputs, TokenBatch

CPU = torch.device("cpu")


def two_steps() -> tuple[StepInputs, StepInputs]:
    """Two prompts of 2 and 3 tokens, and the token that follows each; `b` goes first in the second
    step, where it is the longer one."""
    batch = TokenBatch(max_num_seqs=4, max_model_len=20, block_size=4)
    admitted = tuple(
        Admission(name, tuple(range(10, 10 + length)), length, 0, SamplingParams(), 0)
        for name, length in (("a", 2), ("b", 3))
    )
    rows = (ScheduledRow("a", 0, 2, (0,), True), ScheduledRow("b", 0, 3, (1,), True))
    first = batch.apply(StepPlan(1, (), admitted, rows))
    rows = (ScheduledRow("a", 2, 1, (), True), ScheduledRow("b", 3, 1, (), True))
    return first, batch.apply(StepPlan(2, (), (), rows))


def test_each_row_finds_the_token_that_it_sampled() -> None:
    first, second = two_steps()
    ids = SampledIds(4, CPU)
    sampled = torch.tensor([{"a": 71, "b": 72}[name] for name in first.request_ids])
    ids.keep(first, sampled, torch.tensor([True, True]))
    filled = ids.fill(torch.from_numpy(second.token_ids), second)
    assert second.request_ids == ["b", "a"]
    assert filled.tolist() == [72, 71]


def test_tokens_that_came_with_the_admission_stay_as_they_are() -> None:
    first, _ = two_steps()
    filled = SampledIds(4, CPU).fill(torch.from_numpy(first.token_ids), first)
    assert sorted(filled.tolist()) == [10, 10, 11, 11, 12]


def test_what_an_unsound_row_sampled_can_be_looked_up() -> None:
    first, second = two_steps()
    ids = SampledIds(4, CPU)
    ids.keep(first, torch.tensor([2**40, 2**40]), torch.tensor([False, False]))
    assert ids.fill(torch.from_numpy(second.token_ids), second).tolist() == [0, 0]


def test_a_result_tells_tokens_from_rows_that_failed() -> None:
    copy = HostCopy(CPU, torch.tensor([7, 8]), torch.tensor([True, False]))
    result = SampledStep(["a", "b"], copy).result()
    assert result.token_ids == {"a": (7,)}
    assert result.failed["b"].code == "request_failed"


def test_a_step_that_samples_nothing_ends_with_nothing() -> None:
    result = SampledStep([], HostCopy(CPU)).result()
    assert (result.token_ids, result.failed) == ({}, {})
