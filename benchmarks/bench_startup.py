"""How soon a server is ready, and how much memory its runner takes.

    python benchmarks/bench_startup.py [--repeat N]

Starts `bentoml serve .` with the CB_* settings and a KV pool of 0.5 GiB. Seconds count from the
start of the command to the first 200 of /readyz. Memory is the runner's, when ready and again after
requests have filled the pool: RSS, PSS (what is shared with other processes, divided among them)
and USS (what is its alone), beside the bytes of the weights and of the pool, and beside a process
that has only imported what a runner imports. Appends to results/startup.jsonl.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
from pathlib import Path

import psutil
import record
from bench_engine import config
from serving_client import Server, closed_loop
from serving_process import serving
from turns import add_repeat, end_as_by_ctrl_c
from workload import workload

RUNNER_IMPORTS = ("cb_backend.serving.services", "cb_backend.runtime.model_runner")
MIB = 2**20
POOL_GIB = 0.5
NUM_FILLING_RUNS = 2  # of the mixed workload: 32,000 tokens, more than such a pool holds
READY_TARGET_S = 5.0
MEMORY_TARGET = 1.5  # of the weights, plus the pool

Memory = dict[str, float]  # MiB


def memory_of(process: psutil.Process) -> Memory:
    found = process.memory_full_info()
    return {name: getattr(found, name) / MIB for name in ("rss", "pss", "uss")}


def bare_memory() -> Memory:
    """Of a process that has imported what a runner imports, and has no model."""
    code = f"import {', '.join(RUNNER_IMPORTS)}; print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=record.ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        memory = memory_of(psutil.Process(process.pid))
        process.communicate(b"\n")
    return memory


async def fill_pool(url: str, num_runs: int) -> None:
    server = await Server.at(url)
    for run in range(num_runs):
        await closed_loop(server, server.bodies(workload(), f"run {run}"), concurrency=64)


def memory_text(memory: Memory) -> str:
    return "  ".join(f"{name.upper()} {value:.0f}" for name, value in memory.items())


def bench(repeat: int) -> None:
    folder = Path(config().model)
    weights = sum(file.stat().st_size for file in folder.glob("*.safetensors")) / MIB
    pool = POOL_GIB * 1024
    ready_s, at_ready, filled = [], [], {}
    for index in range(repeat):
        with serving(CB_KV_CACHE_GIB=str(POOL_GIB)) as server:
            ready_s.append(server.wait_until_ready())
            at_ready.append(memory_of(server.worker("EngineRunner")))
            print(f"ready after {ready_s[-1]:.2f} s  MiB: {memory_text(at_ready[-1])}", flush=True)
            if index == repeat - 1:
                asyncio.run(fill_pool(server.url, NUM_FILLING_RUNS))
                filled = memory_of(server.worker("EngineRunner"))
    allowed = MEMORY_TARGET * weights + pool
    bare = bare_memory()
    print(f"pool full: MiB: {memory_text(filled)}  (imports alone: {memory_text(bare)})")
    print(
        f"weights {weights:.0f} MiB, pool {pool:.0f} MiB;"
        f" {MEMORY_TARGET} times the weights and the pool are {allowed:.0f} MiB: "
        + ", ".join(f"{name.upper()} {value / allowed:.2f} of it" for name, value in filled.items())
    )
    added = filled["uss"] - bare["uss"]
    print(f"    {added:.0f} MiB, {added / allowed:.2f} of it, over what the imports take")
    print(f"ready after {statistics.median(ready_s):.2f} s (target {READY_TARGET_S:.0f} s)")
    measured = {
        "ready_s": ready_s,
        "weights_mib": weights,
        "pool_mib": pool,
        "at_ready_mib": at_ready,
        "filled_mib": filled,
        "imports_mib": bare,
    }
    print(f"appended to {record.append('startup', measured).relative_to(record.ROOT)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_repeat(parser, 3, "starts")
    arguments = parser.parse_args()
    end_as_by_ctrl_c()
    bench(arguments.repeat)
