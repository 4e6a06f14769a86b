"""A rehearsal fits into whatever the runner has, and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from cb_backend.core.step_io import PendingStep, StepPlan
from cb_backend.runtime.rehearsal import rehearse
from tests.models import LLAMA
from tests.runtime.driving import Driver, expected_tokens, load_runner, prompt_of


@pytest.mark.parametrize(
    ("max_num_seqs", "max_num_batched_tokens", "settings"),
    [
        (8, 64, {"num_host_kv_blocks": 2}),
        (1, 1, {}),
        (2, 3, {"max_model_len": 1, "num_kv_blocks": 1}),
        (3, 3, {"max_model_len": 2}),
        (8, 64, {"max_model_len": 30, "num_kv_blocks": 8}),
    ],
)
def test_it_fits_and_leaves_nothing_behind(
    max_num_seqs: int,
    max_num_batched_tokens: int,
    settings: dict[str, object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = LLAMA.build()
    LLAMA.save(tmp_path)
    most = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens}
    runner = load_runner(tmp_path, **most, **settings)
    plans: list[StepPlan] = []
    launch = runner.launch

    def noted(plan: StepPlan) -> PendingStep:
        plans.append(plan)
        return launch(plan)

    monkeypatch.setattr(runner, "launch", noted)
    num_host_blocks = 2 if "num_host_kv_blocks" in settings else 0
    rehearse(runner, **most, num_host_blocks=num_host_blocks)
    assert max(plan.num_tokens for plan in plans) == min(
        max_num_batched_tokens, max_num_seqs * runner.model_info.max_model_len
    )
    assert max(len(plan.rows) for plan in plans) <= max_num_seqs
    assert len(runner._batch) == 0
    prompt = prompt_of(1 if runner.model_info.max_model_len < 9 else 5)
    driver = Driver(runner)
    request = driver.add("a", prompt)
    driver.run(1)
    assert request.output == expected_tokens(model, prompt, 1)
