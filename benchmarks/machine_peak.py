"""What this machine can do at most, measured: products of large matrices, and reading memory.

CPU. Everything else is told as a share of these, in the same minute.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from cb_kernels import HugePages

MEASURED_S = 0.3  # of repetition for each figure
GEMM_SIZES = (2048, 4096)
READ_BYTES = 2**29  # many times what a processor's caches hold


def best_seconds(function: Callable[[], object]) -> float:
    """Of one call: the best of several, since what disturbs only ever adds."""
    function()
    best, started = float("inf"), time.perf_counter()
    while (before := time.perf_counter()) - started < MEASURED_S or best == float("inf"):
        function()
        best = min(best, time.perf_counter() - before)
    return best


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
    """Bytes a second that all threads together read from memory, in order, in huge pages."""
    data = HugePages().copy(torch.ones(READ_BYTES // 4))
    return READ_BYTES / best_seconds(data.sum)
