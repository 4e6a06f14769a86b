"""Replayed steps on the kernels for GPUs: one launch for rows of any length."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gpu_check.serving import Logits, recorded_logits
from tests.models import TinyModel
from tests.runtime.driving import Driver, load_runner, prompt_of
from tests.runtime.fake_graphs import FakeMaker

MODELS = (
    TinyModel("llama", "llama", {"num_hidden_layers": 1}),
    TinyModel("mixtral", "mixtral", {"num_hidden_layers": 1, "num_local_experts": 5}),
)
PROMPTS = [prompt_of(length, seed=length) for length in (1, 9)]


def _serve(folder: Path, maker: FakeMaker | None, *, deterministic: bool) -> Logits:
    runner = load_runner(folder, deterministic=deterministic, max_num_seqs=3)
    if maker is not None:
        runner.capture_graphs(maker, max_num_seqs=3)
    driver = Driver(runner)
    with recorded_logits(runner) as logits:
        for i, prompt in enumerate(PROMPTS):
            driver.add(f"{i}", prompt)
        driver.run(3)
    return logits


@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
@pytest.mark.parametrize("tiny", MODELS, ids=str)
def test_logits_are_the_same_with_and_without(
    tiny: TinyModel, deterministic: bool, tmp_path: Path
) -> None:
    folder, maker = tiny.save(tmp_path), FakeMaker()
    expected = _serve(folder, None, deterministic=deterministic)
    actual = _serve(folder, maker, deterministic=deterministic)
    assert maker.num_replays == 2
    assert actual.keys() == expected.keys()
    for key, row in actual.items():
        tolerance = 0.0 if deterministic else 1e-5
        torch.testing.assert_close(row, expected[key], atol=tolerance, rtol=tolerance)
