"""Where a number was measured, and the file that keeps it: one JSON line a measurement."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
SHARES = (50, 95, 99)


def append(name: str, measured: dict[str, object]) -> Path:
    """Add `measured`, with what it was measured on, to the file of benchmark `name`."""
    line = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": machine(),
        "settings": settings(),
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "transformers")},
        **measured,
    }
    RESULTS.mkdir(exist_ok=True)
    file = RESULTS / f"{name}.jsonl"
    with file.open("a") as lines:
        lines.write(json.dumps(line) + "\n")
    return file


def settings() -> dict[str, str]:
    """The CB_* variables that were set; the admin key is nobody's business."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith("CB_") and name != "CB_ADMIN_KEY"
    }


def machine() -> dict[str, object]:
    return {"cpu": _cpu_name(), "cores": os.cpu_count(), "python": platform.python_version()}


def commit() -> str:
    """The checkout's commit; "+" behind it means that files were changed since."""

    def git(*arguments: str) -> str:
        result = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
        return result.stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", ":!benchmarks/results")
    return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """p50, p95 and p99, interpolated as numpy and most load generators do; none of no values."""
    if not values:
        return {}
    return {f"p{share}": float(np.percentile(values, share)) for share in SHARES}


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or "unknown")
