"""gpu-check runs to its end here, in the interpreter; only its numbers need a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gpu_check import behaviour, experts, kernels, linear, models, sanitizer
from gpu_check.__main__ import main, wrong_kernels
from gpu_check.budget import TimeBudget
from gpu_check.report import Speed, write_plot

CPU = torch.device("cpu")

_IMPORTS = """
import sys, gpu_check.__main__
served = ("bentoml", "starlette", "pydantic", "aiohttp", "cb_backend.serving", "cb_backend.engine")
assert not [name for name in sys.modules if name in served]
"""


@pytest.mark.timeout(180)
def test_a_dry_run_checks_and_times_everything(tmp_path: Path) -> None:
    assert main(["--dry-run", "--out", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "gpu_check.json").read_text())
    assert result["wrong"] == []
    assert result["left_out"] == []
    assert {speed["kernel"] for speed in result["speeds"]} >= {
        "rms_norm",
        "store_heads",
        "sample T=1 k=0 p=0.95",
        "attention, decode",
        "attention, prefill",
        "linear, invariant",
        "experts",
        "decode step",
        "prefill step",
    }
    assert all(speed["microseconds"] > 0 for speed in result["speeds"])
    (serving,) = result["serving"]
    assert min(serving[key] for key in ("ours", "theirs", "host_microseconds")) > 0
    assert [path.suffix for path in tmp_path.glob("gpu_check.*g")] in ([".png"], [".svg"])


def test_without_time_everything_is_left_out_by_name(tmp_path: Path) -> None:
    assert main(["--dry-run", "--out", str(tmp_path), "--seconds", "0"]) == 0
    result = json.loads((tmp_path / "gpu_check.json").read_text())
    assert result["speeds"] == []
    names = {"rms_norm bfloat16", "deterministic alone and in chunks, llama", "decode step 1 x 2"}
    assert names < {*result["left_out"]}


def test_a_wrong_kernel_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "rms_norm", lambda x, weight, eps: x)
    monkeypatch.setattr(kernels, "silu_and_mul", lambda x: x[:, :1].unflatten(9, (1, 1)))
    for other in (linear, experts, models, behaviour):
        monkeypatch.setattr(other, "correct", lambda *_, **__: iter(()))
    wrong = wrong_kernels(kernels.TINY, CPU, TimeBudget(100.0))
    assert len(wrong) == 6
    assert wrong[0].startswith("rms_norm bfloat16: off by")
    assert wrong[1].startswith("silu_and_mul bfloat16: IndexError")


def test_a_model_that_is_not_deterministic_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return x @ weight.T * (1.0 + 2.0**-6 * (x.shape[0] > 1))

    monkeypatch.setattr("cb_backend.runtime.models.linear.invariant_linear", multiply)
    case = next(behaviour.correct(CPU, tiny=True))
    assert case.kernel == "deterministic"
    assert not torch.equal(case.run(), case.expected())


def test_what_the_sanitizer_finds_is_told() -> None:
    def found(code: int) -> tuple[str, list[str]]:
        done = subprocess.CompletedProcess[str]([], code, "Invalid __global__ read", "")
        return sanitizer.run(1.0, find=lambda name: f"/bin/{name}", call=lambda *_, **__: done)

    assert sanitizer.run(1.0, find=lambda name: None) == ("not installed", [])
    assert found(0) == ("no errors", [])
    word, lines = found(86)
    assert word == "errors"
    assert lines[-1] == "Invalid __global__ read"

    def hang(*_: object, **__: object) -> subprocess.CompletedProcess[str]:
        raise subprocess.TimeoutExpired("compute-sanitizer", 1.0)

    assert sanitizer.run(1.0, find=str, call=hang) == ("not done after 1 s", [])


def test_the_plot_is_drawn_without_matplotlib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    speed = Speed("rms_norm", "T=1", 2.0, 1.0, 0.0, 0.0, 3.0)
    path = write_plot(tmp_path, "a", [speed, speed])
    assert path.suffix == ".svg"
    assert path.read_text().count("<rect") == 2


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
