"""The scheduler and the engine loop without a model: what they cost, and whether that grows.

    python benchmarks/bench_scheduler.py [step|host|loop|growth ...]

step: one schedule and one update with 512 running and 10,000 waiting requests, all policies.
host: all that the host does for a decoding step, by phase, with 64 to 512 running.
loop: requests and tokens a second through inbox, engine thread, output queue and async streams.
growth: what a step costs after ever more requests have finished.
Appends to results/scheduler.jsonl.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import time
from collections.abc import Callable

import host_step
import record
from cheap import BLOCK_SIZE, NUM_BLOCKS, CheapExecutor, make_request

from cb_backend.config import EngineConfig
from cb_backend.core.policies import POLICIES, policy_of
from cb_backend.core.sampling_params import SamplingParams
from cb_backend.core.scheduler import Scheduler
from cb_backend.core.scheduler_limits import SchedulerLimits
from cb_backend.engine.engine import Engine
from cb_backend.engine.engine_thread import EngineThread
from cb_backend.serving.async_engine import AsyncEngine
from cb_backend.serving.engine_client import GenerateRequest

NUM_RUNNING, NUM_WAITING = 512, 10_000
NUMS_RUNNING = (64, 256, 512)

Results = dict[str, object]


def make_scheduler(policy: str, max_num_seqs: int = NUM_RUNNING) -> Scheduler:
    limits = SchedulerLimits(
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=2048,
        max_prefill_chunk=1024,
        enable_prefix_caching=True,
    )
    return Scheduler(limits, policy_of(EngineConfig(model="cheap"), policy))


def step_seconds(scheduler: Scheduler, executor: CheapExecutor) -> float:
    """Of one step, without the executor's part; of this thread's CPU, so that what else the
    machine does is left out."""
    started = time.thread_time()
    plan = scheduler.schedule()
    scheduled = time.thread_time()
    result = executor.launch(plan).result()
    executed = time.thread_time()
    scheduler.update(plan, result, now=0.0)
    return time.thread_time() - executed + scheduled - started


def bench_step(num_steps: int = 400) -> Results:
    """Answers long enough that requests end, and others take their seats, in many steps."""
    results: Results = {}
    for policy in sorted(POLICIES):
        scheduler, executor, rng = make_scheduler(policy), CheapExecutor(), random.Random(0)
        numbers = itertools.count()

        def submit(scheduler: Scheduler, numbers: itertools.count[int], rng: random.Random) -> None:
            request = make_request(next(numbers), rng, rng.randint(16, 256), rng.randint(50, 800))
            scheduler.add(request)

        for _ in range(NUM_RUNNING + NUM_WAITING):
            submit(scheduler, numbers, rng)
        while len(scheduler.running) < NUM_RUNNING:
            step_seconds(scheduler, executor)
        taken = []
        for _ in range(num_steps):
            taken.append(1e3 * step_seconds(scheduler, executor))
            while len(scheduler.waiting) < NUM_WAITING:
                submit(scheduler, numbers, rng)
        results[policy] = record.percentiles(taken)
        line = "  ".join(
            f"{name} {value:.3f} ms" for name, value in record.percentiles(taken).items()
        )
        print(f"step, {policy:8} {line}", flush=True)
    return results


def bench_host() -> Results:
    results: Results = {}
    for num_running in NUMS_RUNNING:
        taken = host_step.measure(num_running)
        total = taken.pop("step")
        results[str(num_running)] = {"step": total, **taken}
        phases = "  ".join(f"{phase} {us:.0f}" for phase, us in taken.items())
        print(f"host time of a step at {num_running} running: {total:.0f} us ({phases})")
    return results


def bench_loop(num_requests: int = 6000, max_tokens: int = 50, concurrency: int = 512) -> Results:
    """Clients that start the next request when one has ended."""
    config = EngineConfig(
        model="cheap", max_num_seqs=concurrency, max_num_batched_tokens=4 * concurrency
    )
    thread = EngineThread(
        lambda: Engine(config, CheapExecutor(), time.monotonic),
        step_timeout_s=60.0,
        drain_timeout_s=1.0,
    )
    thread.start()
    engine = AsyncEngine(config, thread)
    rng = random.Random(0)
    prompts = [[rng.randrange(50_000) for _ in range(16)] for _ in range(num_requests)]
    params = SamplingParams(max_tokens=max_tokens)

    async def client(left: list[list[int]]) -> int:
        received = 0
        while left:
            request = GenerateRequest(prompt_token_ids=left.pop(), params=params)
            async for event in engine.generate(request):
                received += len(event.token_ids)
        return received

    while not engine.is_ready:
        time.sleep(0.01)

    async def serve() -> tuple[float, float, int]:
        started, cpu = time.perf_counter(), time.process_time()
        received = await asyncio.gather(*(client(prompts) for _ in range(concurrency)))
        return time.perf_counter() - started, time.process_time() - cpu, sum(received)

    seconds, cpu_seconds, received = asyncio.run(serve())
    engine.close()
    assert received == num_requests * max_tokens
    results: Results = {
        "requests_per_s": num_requests / seconds,
        "tokens_per_s": received / seconds,
        "requests_per_cpu_s": num_requests / cpu_seconds,
        "tokens_per_cpu_s": received / cpu_seconds,
    }
    print(
        "loop, " + "  ".join(f"{name} {value:,.0f}" for name, value in results.items()), flush=True
    )
    return results


def bench_growth(num_requests: int = 200_000) -> Results:
    """A full batch throughout; each decade of finished requests has its own median."""
    scheduler, executor, rng = make_scheduler("fair", 64), CheapExecutor(), random.Random(0)
    edges = [num_requests // 1000, num_requests // 100, num_requests // 10, num_requests]
    results: Results = {}
    numbers, finished, taken = itertools.count(), 0, []
    while finished < num_requests:
        while len(scheduler.waiting) < 64:
            scheduler.add(make_request(next(numbers), rng, 16, 4))
        before = len(scheduler.running) + len(scheduler.waiting)
        taken.append(1e3 * step_seconds(scheduler, executor))
        finished += before - len(scheduler.running) - len(scheduler.waiting)
        if finished >= edges[0]:
            results[f"up to {edges.pop(0)}"] = record.percentiles(taken)
            taken = []
            name, values = list(results.items())[-1]
            print(f"growth, {name} finished: {values}", flush=True)
    return results


BENCHES: dict[str, Callable[[], Results]] = {
    "step": bench_step,
    "host": bench_host,
    "loop": bench_loop,
    "growth": bench_growth,
}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("benches", nargs="*", metavar="BENCH", help=f"of {', '.join(BENCHES)}")
    chosen = parser.parse_args().benches or list(BENCHES)
    if unknown := set(chosen) - set(BENCHES):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    file = record.append("scheduler", {name: BENCHES[name]() for name in chosen})
    print(f"appended to {file.relative_to(record.ROOT)}")
