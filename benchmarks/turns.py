"""Engines that run in turns on the same machine, and how their ratio is told.

Speed moves from minute to minute and from machine to machine: the ratio within a turn is the
number to quote, and its spread says how far to trust it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import record

HERE = Path(__file__).resolve().parent
OURS = [sys.executable, str(HERE / "bench_engine.py"), "--on-command"]


class Contestant:
    """A loaded program in a process group of its own, stopped but for its own runs.

    It says READY when it is loaded, takes a line of JSON for each run, and answers with a line
    of RESULT and JSON.
    """

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self.name = name
        self._log_file = log_file(name)
        with self._log_file.open("w") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )

    def load(self) -> None:
        print(f"loading {self.name} (log: {self._log_file.relative_to(record.ROOT)})", flush=True)
        self._read("READY")
        self._signal(signal.SIGSTOP)

    def run(self, **options: object) -> dict[str, Any]:
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(options) + "\n")
        self._process.stdin.flush()
        result: dict[str, Any] = json.loads(self._read("RESULT"))
        self._signal(signal.SIGSTOP)
        return result

    def close(self) -> None:
        self._signal(signal.SIGKILL)
        with self._process:  # closes its pipes and waits
            pass

    def _read(self, word: str) -> str:
        """What stands behind `word` in the next line that starts with it."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(word):
                return line.removeprefix(word)
        sys.exit(f"error: {self.name} ended early; see {self._log_file.relative_to(record.ROOT)}")

    def _signal(self, number: signal.Signals) -> None:
        os.killpg(self._process.pid, number)


def race(peer: str, command: Sequence[str], repeat: int) -> tuple[list[float], list[float]]:
    """Our engine and a peer over the shared workload: output tokens per second of each turn."""
    contestants: list[Contestant] = []
    ours: list[float] = []
    theirs: list[float] = []
    try:
        for name, of_name in (("cb_backend", OURS), (peer, command)):
            contestants.append(Contestant(name, of_name))
            contestants[-1].load()
        for _ in range(repeat):
            ours.append(contestants[0].run()["output_tok_s"])
            theirs.append(contestants[1].run()["output_tok_s"])
            print(
                f"cb_backend {ours[-1]:.1f}  {peer} {theirs[-1]:.1f} output tok/s "
                f" ratio {ours[-1] / theirs[-1]:.2f}",
                flush=True,
            )
    finally:
        for contestant in contestants:
            contestant.close()
    print(f"ratio {ratio_text(ours, theirs)}")
    return ours, theirs


def ratios(of: Sequence[float], to: Sequence[float]) -> list[float]:
    """Turn by turn."""
    return [one / other for one, other in zip(of, to, strict=True)]


def ratio_text(of: Sequence[float], to: Sequence[float]) -> str:
    """The median of the turns' ratios, with the lowest and the highest."""
    found = ratios(of, to)
    return f"{statistics.median(found):.2f} ({min(found):.2f} to {max(found):.2f})"


def add_repeat(parser: argparse.ArgumentParser, default: int, of: str) -> None:
    """--repeat, at least 1: there is no median of nothing."""

    def count(text: str) -> int:
        if (number := int(text)) < 1:
            raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
        return number

    parser.add_argument("--repeat", type=count, default=default, help=f"{of} (default {default})")


def log_file(name: str) -> Path:
    file = record.ROOT / "build" / f"bench-{name}.log"
    file.parent.mkdir(exist_ok=True)
    return file


def end_as_by_ctrl_c() -> None:
    """So that `kill` ends what a benchmark has started, as Ctrl-C does."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
