"""A CPU run never loads triton, and a GPU's tensor never falls back to torch."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from types import SimpleNamespace

import pytest
from cb_kernels.triton import launch

_CPU_RUN = """
import sys, torch, cb_kernels
cb_kernels.rms_norm(torch.ones(2, 8), torch.ones(8), 1e-5)
assert not [name for name in sys.modules if name.partition(".")[0] == "triton"]
"""


def test_a_cpu_run_never_loads_triton() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _CPU_RUN],
        env={"PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == 0, done.stderr


def test_a_gpu_without_triton_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    launch._require_triton.cache_clear()
    with pytest.raises(RuntimeError, match=r"install triton>=3\.6"):
        launch.uses_triton(SimpleNamespace(is_cuda=True))  # type: ignore[arg-type]
    assert launch._require_triton.cache_info().currsize == 0
