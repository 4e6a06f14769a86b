"""What was sampled is where the next step looks for it, and reaches the host."""

from __future__ import annotations

import pytest
import torch

from cb_backend.core.sampling_params import SamplingParams
from cb_backend.core.step_io import Admission, ScheduledRow, StepPlan, StepRows
from cb_backend.runtime.sampled_ids import UNSOUND, HostSampledIds, SampledIds, SampledStep
from cb_backend.runtime.staging import StagedStep, stage
from cb_backend.runtime.streams import HostStreams
from cb_backend.runtime.token_batch import TokenBatch

CPU = torch.device("cpu")
Ids = SampledIds | HostSampledIds


@pytest.fixture(params=["device", "host"])
def ids(request: pytest.FixtureRequest) -> Ids:
    return SampledIds(4, CPU) if request.param == "device" else HostSampledIds(4)


def two_steps() -> tuple[StagedStep, StagedStep]:
    """Two prompts of 2 and 3 tokens, and the token that follows each; `b` goes first in the second
    step, where it is the longer one."""
    batch = TokenBatch(max_num_seqs=4, max_model_len=20, block_size=4, vocab_size=100)
    admitted = tuple(
        Admission(name, tuple(range(10, 10 + length)), length, 0, SamplingParams(), 0)
        for name, length in (("a", 2), ("b", 3))
    )
    rows = (ScheduledRow("a", 0, 2, (0,), True), ScheduledRow("b", 0, 3, (1,), True))
    first = batch.apply(StepPlan(1, (), admitted, StepRows.of(*rows)))
    rows = (ScheduledRow("a", 2, 1, (), True), ScheduledRow("b", 3, 1, (), True))
    second = batch.apply(StepPlan(2, (), (), StepRows.of(*rows)))
    first, second = (stage(inputs, HostStreams(), for_triton=False) for inputs in (first, second))
    return first, second


def test_each_row_finds_the_token_that_it_sampled(ids: Ids) -> None:
    first, second = two_steps()
    sampled = torch.tensor([{"a": 71, "b": 72}[name] for name in first.inputs.request_ids])
    ids.keep(first, sampled)
    ids.fill(second)
    assert second.inputs.request_ids == ["b", "a"]
    assert second.token_ids.tolist() == [72, 71]


def test_tokens_that_came_with_the_admission_stay_as_they_are(ids: Ids) -> None:
    first, _ = two_steps()
    ids.fill(first)
    assert sorted(first.token_ids.tolist()) == [10, 10, 11, 11, 12]


def test_what_an_unsound_row_sampled_can_be_looked_up(ids: Ids) -> None:
    first, second = two_steps()
    ids.keep(first, torch.tensor([UNSOUND, UNSOUND]))
    ids.fill(second)
    assert second.token_ids.tolist() == [0, 0]


def test_a_result_tells_tokens_from_rows_that_failed() -> None:
    reading = HostStreams().read(torch.tensor([7, UNSOUND]))
    result = SampledStep(["a", "b"], reading).result()
    assert result.token_ids == {"a": (7,)}
    assert result.failed["b"].code == "request_failed"


def test_a_step_that_samples_nothing_ends_with_nothing() -> None:
    result = SampledStep([], HostStreams().read(torch.empty(0, dtype=torch.int64))).result()
    assert (result.token_ids, result.failed) == ({}, {})
