from __future__ import annotations

from pathlib import Path

import pytest

from cb_backend.core.step_io import BlockCopy, FinishedStep, StepPlan, StepResult
from cb_backend.runtime import swap_timing
from cb_backend.runtime.swap_timing import measure_swap_costs
from tests.fakes import make_model_info
from tests.models import LLAMA
from tests.runtime.driving import load_runner


class ClockedRunner:
    """A runner whose work takes a known time on a clock of its own."""

    def __init__(self) -> None:
        self.now = 0.0

    def launch(self, plan: StepPlan) -> FinishedStep:
        self.now += 0.5 * plan.num_tokens
        return FinishedStep(StepResult({}, {}))

    def copy_blocks(self, copies: list[BlockCopy]) -> None:
        self.now += 3.0 + 2.0 * len(copies)


def test_call_block_and_token_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = ClockedRunner()
    monkeypatch.setattr(swap_timing.time, "perf_counter", lambda: runner.now)
    costs = measure_swap_costs(runner, make_model_info(), num_host_blocks=8)
    assert costs.copy_call_s == pytest.approx(3.0)
    assert costs.copy_block_s == pytest.approx(2.0)
    assert costs.compute_token_s == pytest.approx(0.5)


def test_a_host_tier_of_one_block_can_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = ClockedRunner()
    monkeypatch.setattr(swap_timing.time, "perf_counter", lambda: runner.now)
    costs = measure_swap_costs(runner, make_model_info(), num_host_blocks=1)
    assert costs.copy_call_s + costs.copy_block_s == pytest.approx(5.0)


def test_a_real_runner_knows_its_costs_and_its_batch_is_empty_again(tmp_path: Path) -> None:
    LLAMA.build().save_pretrained(tmp_path)
    runner = load_runner(tmp_path, num_host_kv_blocks=4)
    costs = runner.model_info.swap_costs
    assert costs.copy_block_s >= 0
    assert 0 < costs.compute_token_s < 1
    runner.close()
