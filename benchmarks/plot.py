"""Throughput against latency, from results/serving.jsonl, as a PNG.

    python benchmarks/plot.py [--output FILE]

A row for each workload; a curve for each system, kind of arrivals and day; a point for each rate or
number of clients, the median of its runs. Needs matplotlib (the extra `plan`).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import record

Line = dict[str, Any]
Curve = list[tuple[float, Line]]  # rate or clients, and the median of each figure there

LATENCIES = {"ttft_ms": "TTFT p95, ms", "itl_ms": "ITL p95, ms", "tpot_ms": "TPOT p95, ms"}
SHARE = "p95"


def curves(lines: Iterable[Line]) -> dict[str, dict[str, Curve]]:
    """Workload to label to curve. Runs without a single answer have no latency and are left out."""
    runs: dict[tuple[str, str], dict[float, list[Line]]] = defaultdict(lambda: defaultdict(list))
    for line in lines:
        if not line["ttft_ms"]:
            continue
        kind = "rate" if "rate" in line else "concurrency"
        label = f"{line['system']}, {line['model']}, {kind}, {line['time'][:10]}"
        runs[line["workload"], label][line[kind]].append(_point(line))
    found: dict[str, dict[str, Curve]] = {}
    for (workload, label), points in runs.items():
        curve = [(load, _median(points[load])) for load in sorted(points)]
        found.setdefault(workload, {})[label] = curve
    return found


def _point(line: Line) -> Line:
    # An answer of one token has no gaps, and a run of such answers no ITL.
    latencies = {name: line[name][SHARE] for name in LATENCIES if line[name]}
    return {"output_tok_s": line["output_tok_s"], **latencies}


def _median(points: list[Line]) -> Line:
    names = set.intersection(*(set(point) for point in points))
    return {name: statistics.median(point[name] for point in points) for name in names}


def draw(found: dict[str, dict[str, Curve]], output: Path) -> None:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        sys.exit("error: the plot needs matplotlib: pip install 'cb-backend[plan]'")
    figure = Figure(figsize=(13, 4.2 * len(found)), layout="constrained")
    FigureCanvasAgg(figure)
    rows = figure.subplots(len(found), len(LATENCIES), squeeze=False)
    for row, (workload, of_workload) in zip(rows, found.items(), strict=True):
        for axes, (name, title) in zip(row, LATENCIES.items(), strict=True):
            for label, curve in of_workload.items():
                points = [(load, point) for load, point in curve if name in point]
                x = [point["output_tok_s"] for _, point in points]
                y = [point[name] for _, point in points]
                axes.plot(x, y, marker="o", label=label)
                for (load, _), at in zip(points, zip(x, y, strict=True), strict=True):
                    axes.annotate(f"{load:g}", at, xytext=(4, 4), textcoords="offset points")
            axes.set(title=workload, xlabel="output tok/s", ylabel=title)
            axes.margins(0.15)
            axes.set_xlim(left=0)
            axes.set_ylim(bottom=0)
            axes.grid(alpha=0.3)
        row[0].legend(fontsize="small")
    figure.savefig(output, format="png", dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, default=record.RESULTS / "serving.png")
    output = parser.parse_args().output
    file = record.RESULTS / "serving.jsonl"
    if not file.exists():
        sys.exit("error: nothing to draw yet; run benchmarks/bench_serving.py")
    found = curves(map(json.loads, file.read_text().splitlines()))
    if not found:
        sys.exit(f"error: no run in {file.relative_to(record.ROOT)} has an answer")
    draw(found, output)
    print(f"drawn to {output}")


if __name__ == "__main__":
    main()
