"""The table, the JSON and the plot of a check."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from pathlib import Path

from gpu_check.kernels import Timed

_BAR_WIDTH, _ROW_HEIGHT, _LABEL_WIDTH = 400, 18, 260


@dataclass(frozen=True, slots=True)
class Speed:
    """A timing beside its floor."""

    kernel: str
    shape: str
    microseconds: float
    floor_microseconds: float
    terabytes_per_second: float
    teraflops_per_second: float
    host_microseconds: float  # to launch it without a graph

    @property
    def share(self) -> float:
        """Of the floor's rate: 1 is as fast as the device can be."""
        return self.floor_microseconds / self.microseconds

    @classmethod
    def of(
        cls, case: Timed, seconds: float, host_seconds: float, *, bandwidth: float, flops: float
    ) -> Speed:
        """`bandwidth` in bytes and `flops` per second are the device's, as measured."""
        floor = max(case.num_bytes / bandwidth, case.num_flops / flops)
        return cls(
            *(case.kernel, case.shape, seconds * 1e6, floor * 1e6),
            terabytes_per_second=case.num_bytes / seconds / 1e12,
            teraflops_per_second=case.num_flops / seconds / 1e12,
            host_microseconds=host_seconds * 1e6,
        )

    def __str__(self) -> str:
        rates = f"{self.terabytes_per_second:8.3f} TB/s {self.teraflops_per_second:8.1f} TFLOP/s"
        return (
            f"{self.kernel:20} {self.shape:14} {self.microseconds:10.1f} us"
            f" {self.floor_microseconds:10.1f} us floor {self.share:6.1%} {rates}"
            f" {self.host_microseconds:8.1f} us host"
        )


def svg(title: str, speeds: list[Speed]) -> str:
    """Bars of each kernel's share of its floor's rate."""
    height = (len(speeds) + 2) * _ROW_HEIGHT
    width = _LABEL_WIDTH + _BAR_WIDTH + 60
    rows = []
    for i, speed in enumerate(speeds):
        y = (i + 1) * _ROW_HEIGHT
        length = min(1.0, speed.share) * _BAR_WIDTH
        label = escape(f"{speed.kernel} {speed.shape}")
        rows.append(
            f'<text x="{_LABEL_WIDTH - 8}" y="{y + 13}" text-anchor="end">{label}</text>'
            f'<rect x="{_LABEL_WIDTH}" y="{y + 2}" width="{length:.1f}" height="13" fill="#47a"/>'
            f'<text x="{_LABEL_WIDTH + length + 5:.1f}" y="{y + 13}">{speed.share:.0%}</text>'
        )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"'
        ' font-family="sans-serif" font-size="12">'
        f'<text x="8" y="13">{escape(title)}</text>' + "".join(rows) + "</svg>\n"
    )


def write_plot(folder: Path, title: str, speeds: list[Speed]) -> Path:
    """gpu_check.png where matplotlib is at hand, else gpu_check.svg."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        path = folder / "gpu_check.svg"
        path.write_text(svg(title, speeds))
        return path
    figure = Figure(figsize=(9, 1 + 0.22 * len(speeds)), layout="constrained")
    axes = figure.subplots()
    labels = [f"{speed.kernel} {speed.shape}" for speed in speeds]
    axes.barh(range(len(speeds)), [speed.share for speed in speeds], color="#4477aa")
    axes.set_yticks(range(len(speeds)), labels, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.set_title(title)
    path = folder / "gpu_check.png"
    figure.savefig(path, dpi=120)
    return path
