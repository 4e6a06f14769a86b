"""What this machine can do at most, measured: products of large matrices, and reading memory.

CPU. Everything else is told as a share of these, in the same minute.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import cache, partial

import torch
import torch.nn.functional as F
from cb_kernels import HugePages

MEASURED_S = 0.3  # of repetition for each figure
GEMM_SIZES = (2048, 4096)
READ_BYTES = 2**29  # many times what a processor's caches hold


def seconds_of_calls(function: Callable[[], object]) -> list[float]:
    """Of at least one call, after one that does not count."""
    function()
    seconds: list[float] = []
    started = time.perf_counter()
    while (before := time.perf_counter()) - started < MEASURED_S or not seconds:
        function()
        seconds.append(time.perf_counter() - before)
    return seconds


def best_seconds(function: Callable[[], object]) -> float:
    """Of one call: the best of several, since what disturbs only ever adds."""
    return min(seconds_of_calls(function))


def gemm_flops(dtype: torch.dtype) -> float:
    """Operations a second of the fastest large product there is."""
    best = 0.0
    for size in GEMM_SIZES:
        x, weight = (torch.randn(size, size).to(dtype) for _ in range(2))
        for product in products(weight):
            best = max(best, 2 * size**3 / best_seconds(partial(product, x)))
    return best


def products(weight: torch.Tensor) -> list[Callable[[torch.Tensor], torch.Tensor]]:
    """torch's own, and oneDNN's with the weight packed where there is one."""
    found: list[Callable[[torch.Tensor], torch.Tensor]] = [lambda x: F.linear(x, weight)]
    if (packed := onednn_linear(weight)) is not None:
        found.append(packed)
    return found


def onednn_linear(weight: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """x W^T with the weight in oneDNN's blocked layout; None where torch does not offer it."""
    if not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return None
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, 16)

    def product(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
        return y

    return product


def read_bandwidth() -> float:
    """Bytes a second that all threads together read from memory, in order, in huge pages: the
    most in this moment."""
    return READ_BYTES / best_seconds(_memory().sum)


def usual_read_bandwidth() -> float:
    """The same, but what most readings of this moment get: to compare with what is usual too."""
    return READ_BYTES / statistics.median(seconds_of_calls(_memory().sum))


@cache
def _memory() -> torch.Tensor:
    return HugePages().copy(torch.ones(READ_BYTES // 4))
