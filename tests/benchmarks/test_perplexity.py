"""The perplexity that is reported is the model's, and int8 moves it little."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from perplexity import CHUNK, measured

from cb_backend.config import EngineConfig
from tests.models import TinyModel
from tests.runtime.driving import prompt_of


def test_perplexity_is_that_of_transformers_and_int8_is_near(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = TinyModel("llama", "llama", {"head_dim": 32, "intermediate_size": 96})
    windows = [prompt_of(length, seed=length) for length in (CHUNK + 40, 50)]
    settings = EngineConfig(model=str(tiny.save(tmp_path)), dtype="float32", device="cpu")
    found = measured(settings, windows)
    model, total = tiny.build(), 0.0
    for window in windows:
        ids = torch.tensor([window])
        with torch.inference_mode():
            total += float(model(input_ids=ids, labels=ids).loss) * (len(window) - 1)
    exact = math.exp(total / sum(len(window) - 1 for window in windows))
    assert found["none"] == pytest.approx(exact, rel=1e-4)
    assert found["int8"] == pytest.approx(exact, rel=0.02)
    assert found["int8"] != found["none"]
    assert "quantization int8, torch.float32" in capsys.readouterr().out
