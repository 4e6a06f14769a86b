"""The kernels under NVIDIA's compute-sanitizer, where it is installed: reads and writes out of
bounds, which a test of values may miss.

    python -m gpu_check.sanitizer

is what it runs: every kernel once, at tiny sizes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable

import torch

from gpu_check import experts, kernels, linear

_ERROR_CODE = 86


def run(
    seconds: float,
    find: Callable[[str], str | None] = shutil.which,
    call: Callable[..., subprocess.CompletedProcess[str]] = subprocess.run,
) -> tuple[str, list[str]]:
    """What happened in a word or two, and what is wrong."""
    tool = find("compute-sanitizer")
    if tool is None:
        return "not installed", []
    command = [tool, "--tool", "memcheck", "--error-exitcode", str(_ERROR_CODE)]
    # Torch's own reuse of memory would hide what lies past a tensor's end.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    try:
        done = call(
            [*command, sys.executable, "-m", "gpu_check.sanitizer"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        return f"not done after {seconds:.0f} s", []
    if done.returncode == 0:
        return "no errors", []
    tail = (done.stdout + done.stderr).strip().splitlines()[-15:]
    return "errors", [f"compute-sanitizer ends with {done.returncode}:", *tail]


def main() -> int:
    for part in (kernels, linear, experts):
        for case in part.correct(kernels.TINY, torch.device("cuda")):
            case.run()
    torch.cuda.synchronize()
    return 0


if __name__ == "__main__":
    sys.exit(main())
