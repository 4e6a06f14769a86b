"""Logits are edited by what a row's own request has said, and by nothing else: on a CPU, and on a
GPU, whose kernel's place its reference takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import cb_kernels
import pytest
import torch
from cb_kernels import LogitEdits, reference
from torch import Tensor
from transformers import RepetitionPenaltyLogitsProcessor

from cb_backend.core.sampling_params import SamplingParams
from cb_backend.core.step_io import Admission, ScheduledRow, StepPlan, StepRows
from cb_backend.runtime.host_logit_editor import HostLogitEditor
from cb_backend.runtime.logit_editor import DeviceLogitEditor, LogitEditor
from cb_backend.runtime.staging import stage
from cb_backend.runtime.streams import HostStreams
from cb_backend.runtime.token_batch import TokenBatch
from tests.runtime.edited import edited

VOCAB_SIZE = 70
EOS = 9
ALL = SamplingParams(
    presence_penalty=0.7,
    frequency_penalty=0.3,
    repetition_penalty=1.7,
    logit_bias={3: 5.0, 33: -100.0},
    min_tokens=2,
)
NEGATIVE = SamplingParams(presence_penalty=-0.7, frequency_penalty=-0.3, repetition_penalty=0.6)
REPETITION = SamplingParams(repetition_penalty=1.3)
BIAS = SamplingParams(logit_bias={0: 1.5, 69: -2.0})
PLAIN = SamplingParams()
KINDS = (ALL, NEGATIVE, REPETITION, BIAS, PLAIN)


@dataclass
class Rows:
    """A batch and an editor; a request's tokens are those that the test gives it."""

    editor: LogitEditor
    batch: TokenBatch = field(
        default_factory=lambda: TokenBatch(
            max_num_seqs=8,
            max_model_len=40,
            block_size=40,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=(EOS,),
        )
    )
    live: dict[str, tuple[list[int], int]] = field(default_factory=dict)  # tokens, computed
    admitted: list[Admission] = field(default_factory=list)
    retired: list[str] = field(default_factory=list)

    def admit(self, name: str, params: SamplingParams, prompt: Sequence[int], *output: int) -> None:
        self.live[name] = ([*prompt, *output], 0)
        ids = tuple(self.live[name][0])
        self.admitted.append(Admission(name, ids, len(prompt), 0, params, 0))

    def retire(self, *names: str) -> None:
        for name in names:
            del self.live[name]
            self.retired.append(name)

    def step(
        self, logits: Tensor, sampled: dict[str, int], unsound: Sequence[str] = ()
    ) -> dict[str, Tensor]:
        """Edited logits of each row in `sampled`, of as many `logits`; then its token is that."""
        rows = []
        for name in sampled:
            token_ids, computed = self.live[name]
            blocks = () if computed else (0,)
            rows.append(ScheduledRow(name, computed, len(token_ids) - computed, blocks, True))
        inputs = self.batch.apply(
            StepPlan(0, tuple(self.retired), tuple(self.admitted), StepRows.of(*rows))
        )
        self.retired, self.admitted = [], []
        order = [list(sampled).index(name) for name in inputs.request_ids]
        logits = logits[order]
        for_triton = isinstance(self.editor, DeviceLogitEditor)
        step = stage(inputs, HostStreams(), for_triton=for_triton)
        logits = self.editor.edit(logits, step)
        tokens = torch.tensor([sampled[name] for name in inputs.request_ids])
        sound = torch.tensor([name not in unsound for name in inputs.request_ids])
        self.editor.count(step, tokens, sound)
        for name, token_id in sampled.items():
            self.live[name] = ([*self.live[name][0], token_id], len(self.live[name][0]))
        return dict(zip(inputs.request_ids, logits, strict=True))


NewRows = Callable[[], Rows]


def by_reference(logits: Tensor, edits: LogitEdits) -> Tensor:
    return reference.edit_logits(logits, edits).float()


@pytest.fixture(params=["host", "device"])
def new_rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> NewRows:
    monkeypatch.setattr(cb_kernels, "edit_logits", by_reference)
    if request.param == "host":
        return lambda: Rows(HostLogitEditor(VOCAB_SIZE))
    return lambda: Rows(DeviceLogitEditor(VOCAB_SIZE, 8, torch.device("cpu")))


def same(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-6)


def random_logits(num_rows: int, seed: int = 0) -> Tensor:
    return torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 3


def prompt_of(number: int) -> list[int]:
    return [(number * 11 + i * i) % VOCAB_SIZE for i in range(number + 2)]


def test_rows_are_edited_as_vllm_defines_it(new_rows: NewRows) -> None:
    rows, tokens = new_rows(), [5, 33, 5, 0, 69, 5]
    for i, params in enumerate(KINDS):
        rows.admit(f"{i}", params, prompt_of(i))
    for step, token in enumerate(tokens):
        logits = random_logits(len(KINDS), step)
        actual = rows.step(logits, {f"{i}": (token + i) % VOCAB_SIZE for i in range(len(KINDS))})
        for i, params in enumerate(KINDS):
            output = [(before + i) % VOCAB_SIZE for before in tokens[:step]]
            expected = edited(logits[i], prompt_of(i), output, params, (EOS,))
            same(actual[f"{i}"], expected)


def test_a_row_is_edited_the_same_whatever_shares_its_step(new_rows: NewRows) -> None:
    logits = random_logits(len(KINDS))
    together = new_rows()
    for i, params in enumerate(KINDS):
        together.admit(f"{i}", params, prompt_of(i), 5, 5)
    expected = together.step(logits, {f"{i}": 1 for i in range(len(KINDS))})
    for i, params in enumerate(KINDS):
        alone = new_rows()
        alone.admit("alone", params, prompt_of(i), 5, 5)
        actual = alone.step(logits[i : i + 1].clone(), {"alone": 1})
        assert torch.equal(actual["alone"], expected[f"{i}"])


def test_what_was_generated_before_a_preemption_still_counts_as_generated(
    new_rows: NewRows,
) -> None:
    rows = new_rows()
    rows.admit("a", ALL, prompt_of(1))
    for token in (5, 5, 8):
        rows.step(random_logits(1), {"a": token})
    rows.retire("a")
    rows.admit("a", ALL, prompt_of(1), 5, 5, 8)
    for output in ([5, 5, 8], [5, 5, 8, 5]):
        logits = random_logits(1, seed=7)
        expected = edited(logits[0], prompt_of(1), output, ALL, (EOS,))
        same(rows.step(logits, {"a": 5})["a"], expected)


def test_a_row_leaves_nothing_to_its_next_owner(new_rows: NewRows) -> None:
    rows = new_rows()
    rows.admit("stopped", ALL, prompt_of(6))
    rows.admit("failed", NEGATIVE, prompt_of(5))
    both = {"stopped": 5, "failed": 6}
    rows.step(random_logits(2), both)
    rows.step(random_logits(2), both)  # computed in vain, behind the one that ended it
    rows.step(random_logits(2), both, unsound=["failed"])
    rows.retire("stopped", "failed")
    rows.admit("next", ALL, prompt_of(1))
    rows.admit("other", REPETITION, prompt_of(2))
    logits = random_logits(2, seed=3)
    actual = rows.step(logits, {"next": 1, "other": 1})
    for row, (name, params) in enumerate((("next", ALL), ("other", REPETITION))):
        expected = edited(logits[row], prompt_of(row + 1), [], params, (EOS,))
        same(actual[name], expected)


def test_a_row_that_only_has_biases_is_not_touched_by_what_was_counted_there(
    new_rows: NewRows,
) -> None:
    rows = new_rows()
    rows.admit("before", ALL, prompt_of(6))
    rows.step(random_logits(1), {"before": 5})
    rows.retire("before")
    rows.admit("biased", BIAS, prompt_of(1))
    rows.admit("penalized", ALL, prompt_of(1))
    logits = random_logits(2)
    actual = rows.step(logits, {"biased": 5, "penalized": 5})
    same(actual["biased"], edited(logits[0], prompt_of(1), [], BIAS))


def test_a_token_of_an_unsound_row_is_not_counted(new_rows: NewRows) -> None:
    rows = new_rows()
    rows.admit("a", ALL, prompt_of(1))
    rows.step(random_logits(1), {"a": 2**40}, unsound=["a"])
    logits = random_logits(1)
    expected = edited(logits[0], prompt_of(1), [], ALL, (EOS,))
    same(rows.step(logits, {"a": 5})["a"], expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rows_beside_an_edited_one_keep_their_logits(dtype: torch.dtype, new_rows: NewRows) -> None:
    rows, logits = new_rows(), random_logits(2).to(dtype)
    rows.admit("plain", PLAIN, prompt_of(3))
    rows.admit("edited", ALL, prompt_of(1))
    actual = rows.step(logits, {"plain": 1, "edited": 1})
    assert torch.equal(actual["plain"], logits[0].float())
    same(actual["edited"], edited(logits[1], prompt_of(1), [], ALL, (EOS,)))


def test_a_step_of_plain_rows_stays_as_it_is(new_rows: NewRows) -> None:
    rows = new_rows()
    rows.admit("penalized", ALL, prompt_of(1))
    rows.admit("plain", PLAIN, prompt_of(1))
    plan = StepPlan(
        *(0, (), tuple(rows.admitted)),
        StepRows.of(ScheduledRow("plain", 0, len(prompt_of(1)), (0,), True)),
    )
    step = stage(rows.batch.apply(plan), HostStreams(), for_triton=True)
    assert (step.inputs.edits, step.edits) == (None, None)
    logits = random_logits(1).bfloat16()
    assert rows.editor.edit(logits, step) is logits


def test_the_device_keeps_nothing_for_rows_that_nobody_penalizes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cb_kernels, "edit_logits", by_reference)
    editor = DeviceLogitEditor(VOCAB_SIZE, 8, torch.device("cpu"))
    rows = Rows(editor)
    rows.admit("plain", PLAIN, prompt_of(1))
    rows.admit("biased", BIAS, prompt_of(1))
    rows.step(random_logits(2), {"plain": 1, "biased": 1})
    assert editor._counts.numel() == 0
    rows.admit("penalized", REPETITION, prompt_of(1))
    rows.step(random_logits(1), {"penalized": 1})
    assert editor._counts.shape == (3, VOCAB_SIZE)
    for place in range(5):  # of the 8 rows that the batch has
        rows.admit(f"penalized {place}", REPETITION, prompt_of(1))
        rows.step(random_logits(1), {f"penalized {place}": 1})
    assert editor._counts.shape == (8, VOCAB_SIZE)


@pytest.mark.parametrize("penalty", [0.5, 1.1, 2.0])
def test_repetition_on_a_cpu_is_that_of_transformers_to_the_bit(penalty: float) -> None:
    rows, output = Rows(HostLogitEditor(VOCAB_SIZE)), [7, 5, 7]
    rows.admit("a", SamplingParams(repetition_penalty=penalty), prompt_of(6), *output)
    logits = random_logits(1)
    theirs = RepetitionPenaltyLogitsProcessor(penalty)(
        torch.tensor([[*prompt_of(6), *output]]), logits.clone()
    )
    assert torch.equal(rows.step(logits, {"a": 1})["a"], theirs[0])


@pytest.mark.parametrize("penalty", [1e-300, 5e-324, 1e-7, 100.0])
def test_an_extreme_repetition_penalty_leaves_finite_logits(
    penalty: float, new_rows: NewRows
) -> None:
    rows = new_rows()
    rows.admit("a", SamplingParams(repetition_penalty=penalty), list(range(VOCAB_SIZE // 2)))
    assert rows.step(random_logits(1) * 100, {"a": 1})["a"].isfinite().all()
