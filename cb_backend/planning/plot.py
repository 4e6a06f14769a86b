"""The plan as a picture. Needs matplotlib, which only this module imports."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cb_backend.errors import ConfigError
from cb_backend.planning.capacity import Prediction, Target

try:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
except ImportError:
    raise ConfigError(
        "--plot needs matplotlib, which is not installed: pip install 'cb-backend[plan]'"
    ) from None


def draw(path: Path, predictions: Sequence[Prediction], target: Target) -> None:
    """A PNG of TTFT, ITL and throughput over the number of replicas. Raises ConfigError if the
    file cannot be written."""
    figure = Figure(figsize=(11, 4), layout="constrained")
    FigureCanvasAgg(figure)
    ttft, itl, throughput = figure.subplots(1, 3)
    replicas = [p.num_replicas for p in predictions]
    for axes, title, target_s, values in (
        (ttft, "TTFT, ms", target.ttft_s, [p.ttft_s for p in predictions]),
        (itl, "ITL, ms", target.itl_s, [p.itl_s for p in predictions]),
    ):
        for share in (50, 95, 99):
            line = [1e3 * of_count[share] for of_count in values]
            axes.plot(replicas, line, marker="o", label=f"p{share}")
        axes.axhline(1e3 * target_s, color="black", linestyle="--", label="target of p95")
        axes.set(title=title, ylim=(0, None))
        axes.legend()
    throughput.plot(replicas, [p.output_tokens_per_s for p in predictions], marker="o")
    throughput.set(title="output tokens/s", ylim=(0, None))
    for axes in (ttft, itl, throughput):
        axes.set(xlabel="replicas", xticks=replicas)
        axes.grid(alpha=0.3)
    try:
        figure.savefig(path, format="png", dpi=120)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}", field="plot") from None
