"""gpu-check runs to its end here, in the interpreter; only its numbers need a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gpu_check import kernels
from gpu_check.__main__ import main, wrong_kernels

CPU = torch.device("cpu")

_IMPORTS = """
import sys, gpu_check.__main__
served = ("bentoml", "starlette", "pydantic", "aiohttp", "cb_backend.serving", "cb_backend.engine")
assert not [name for name in sys.modules if name in served]
"""


def test_a_dry_run_checks_and_times_everything(tmp_path: Path) -> None:
    assert main(["--dry-run", "--out", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "gpu_check.json").read_text())
    assert result["wrong"] == []
    assert {speed["kernel"] for speed in result["speeds"]} >= {
        "rms_norm",
        "store_heads",
        "sample T=1 k=0 p=0.95",
        "attention, decode",
        "attention, prefill",
        "decode step",
        "prefill step",
    }
    assert all(speed["microseconds"] > 0 for speed in result["speeds"])
    assert (tmp_path / "gpu_check.svg").read_text().count("<rect") == len(result["speeds"])


def test_a_wrong_kernel_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "rms_norm", lambda x, weight, eps: x)
    monkeypatch.setattr(kernels, "silu_and_mul", lambda x: x[:, :1].unflatten(9, (1, 1)))
    wrong = wrong_kernels(kernels.TINY, CPU)
    assert len(wrong) == 6
    assert wrong[0].startswith("rms_norm bfloat16: off by")
    assert wrong[1].startswith("silu_and_mul bfloat16: IndexError")


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert main([]) == 2
    assert "no GPU" in capsys.readouterr().out


def test_it_imports_nothing_of_the_serving_layer() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _IMPORTS],
        env={"PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        timeout=55,
    )
    assert done.returncode == 0, done.stderr
