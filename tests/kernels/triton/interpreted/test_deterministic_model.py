"""A whole model on the kernels for GPUs is deterministic: layers, attention, sampler."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu_check.serving import recorded_logits
from tests.models import TinyModel
from tests.runtime.driving import Driver, load_runner, prompt_of
from tests.runtime.logits import differing

PROMPTS = [prompt_of(length, seed=length) for length in (1, 9, 22)]


@pytest.mark.parametrize(
    "tiny",
    [
        TinyModel("llama", "llama", {"num_hidden_layers": 1, "attention_bias": True}),
        TinyModel("qwen3", "qwen3", {"num_hidden_layers": 1, "head_dim": 16}),
        TinyModel("mixtral", "mixtral", {"num_hidden_layers": 1, "num_local_experts": 5}),
    ],
    ids=str,
)
def test_logits_are_the_same_to_the_bit(tiny: TinyModel, tmp_path: Path) -> None:
    runner = load_runner(tiny.save(tmp_path), deterministic=True)
    assert not runner._forward_pass._by_token
    with recorded_logits(runner) as alone:
        for i, prompt in enumerate(PROMPTS):
            driver = Driver(runner)
            driver.add(f"{i}/alone", prompt)
            driver.run(2)
    with recorded_logits(runner) as together:
        driver = Driver(runner)
        for i, prompt in enumerate(PROMPTS):
            driver.add(f"{i}/together", prompt)
        driver.run(2, budget=7)
    assert len(together) == 2 * len(PROMPTS)
    assert differing(together, alone) == []
