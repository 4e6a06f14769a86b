"""How long work takes on a device, and what the device can do at best."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

Run = Callable[[], Any]

_REPEATS = 9
_GRAPH_SECONDS = 0.05
_CALLS = 32  # in one graph: a replay's own cost, some microseconds, is shared by them


def seconds_per_call(runs: Sequence[Run], device: torch.device) -> float:
    """The median time of a call, of calls that take turns (so that none finds its own inputs in
    the cache, if they are enough). On a GPU a captured graph: no time of the host is in it."""
    if device.type != "cuda":
        start = time.perf_counter()
        for run in runs:
            run()
        return (time.perf_counter() - start) / len(runs)
    for run in runs:
        run()
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    runs[0]()
    torch.cuda.synchronize(device)
    fitting = int(_GRAPH_SECONDS / (time.perf_counter() - start))
    calls = list(runs) * -(-min(_CALLS, max(1, fitting)) // len(runs))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in calls:
            run()
    graph.replay()
    samples: list[float] = []
    for _ in range(_REPEATS):
        start_event = torch.cuda.Event(enable_timing=True)
        end_event = torch.cuda.Event(enable_timing=True)
        start_event.record()
        graph.replay()
        end_event.record()
        end_event.synchronize()
        samples.append(start_event.elapsed_time(end_event) / 1e3 / len(calls))
    return statistics.median(samples)


def host_seconds(run: Run, device: torch.device) -> float:
    """How long the host takes to hand a call to the device, without waiting for it."""
    _synchronize(device)
    start = time.perf_counter()
    run()
    elapsed = time.perf_counter() - start
    _synchronize(device)
    return elapsed


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def num_copies(num_bytes: int, device: torch.device) -> int:
    """How many sets of inputs it takes until none is still in the L2 cache at its next turn."""
    if device.type != "cuda":
        return 1
    cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    return max(1, min(_CALLS, 1 + 2 * cache_bytes // max(1, num_bytes)))


def copy_bytes_per_second(device: torch.device, num_bytes: int) -> float:
    """Bytes read and written by a plain copy."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source)
    return 2 * num_bytes / seconds_per_call([lambda: target.copy_(source)], device)


def flops_per_second(device: torch.device, size: int) -> float:
    """Of a product of random bfloat16 matrices: zeros would draw less power and run faster."""
    a, b = torch.randn(2, size, size, device=device).bfloat16()
    out = torch.empty_like(a)
    return 2 * size**3 / seconds_per_call([lambda: torch.matmul(a, b, out=out)], device)
