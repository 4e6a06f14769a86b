"""The engine in this process, without HTTP, over the shared workload.

    python benchmarks/bench_engine.py [--repeat N] [--quantization int8]

Takes the CB_* settings; without CB_MODEL it takes the default model. Prints each run and appends
all of them to results/engine.jsonl.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import sys
import time
from itertools import pairwise
from typing import get_args

import psutil
import record
from turns import add_repeat
from workload import Requests, requests_of, workload

from cb_backend import default_model
from cb_backend.config import EngineConfig, Quantization
from cb_backend.core.sampling_params import SamplingParams
from cb_backend.factory import create_engine
from cb_backend.serving.async_engine import AsyncEngine
from cb_backend.serving.engine_client import GenerateRequest
from cb_backend.serving.model_source import model_source
from cb_backend.serving.settings import DEFAULT_MODEL, config_from_env

NUM_WARM_UP = 8  # requests


@dataclasses.dataclass(frozen=True)
class Run:
    seconds: float
    output_tok_s: float
    total_tok_s: float
    ttft_ms: dict[str, float]
    itl_ms: dict[str, float]

    def __str__(self) -> str:
        def line(name: str, values: dict[str, float]) -> str:
            return f"{name} ms " + " ".join(f"{key} {value:.1f}" for key, value in values.items())

        return (
            f"{self.seconds:.2f} s  {self.output_tok_s:.1f} output tok/s "
            f" {self.total_tok_s:.1f} total tok/s  {line('TTFT', self.ttft_ms)} "
            f" {line('ITL', self.itl_ms)}"
        )


async def measure(
    engine: AsyncEngine, requests: Requests, *, cache_salt: str, concurrency: int | None = None
) -> Run:
    """Submit all at once, or so many that `concurrency` are under way.

    A salt of its own gives a run a cold prefix cache. All times count from the start of the run.
    """
    seats = asyncio.Semaphore(concurrency or len(requests))

    async def seated(prompt: list[int], count: int) -> list[float]:
        async with seats:
            return await _token_times(engine, prompt, count, cache_salt)

    started = time.monotonic()
    times = await asyncio.gather(*(seated(prompt, count) for prompt, count in requests))
    seconds = max(of_request[-1] for of_request in times) - started
    num_output = sum(len(of_request) for of_request in times)
    assert num_output == sum(count for _, count in requests)
    num_prompt = sum(len(prompt) for prompt, _ in requests)
    gaps = [later - earlier for of_request in times for earlier, later in pairwise(of_request)]
    return Run(
        seconds=seconds,
        output_tok_s=num_output / seconds,
        total_tok_s=(num_output + num_prompt) / seconds,
        ttft_ms=record.percentiles([1e3 * (of_request[0] - started) for of_request in times]),
        itl_ms=record.percentiles([1e3 * gap for gap in gaps]),
    )


async def _token_times(
    engine: AsyncEngine, prompt: list[int], num_output: int, cache_salt: str
) -> list[float]:
    """When each output token was there, by the engine's clock (time.monotonic)."""
    request = GenerateRequest(
        prompt_token_ids=prompt,
        params=SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True),
        cache_salt=cache_salt,
    )
    return [event.time async for event in engine.generate(request) for _ in event.token_ids]


async def load(config: EngineConfig) -> AsyncEngine:
    """A running engine that has computed something already, and has its memory."""
    engine = create_engine(config)
    while not engine.is_ready:
        if not engine.is_alive:
            sys.exit(f"error: {engine.status_text}")
        await asyncio.sleep(0.05)
    await measure(engine, workload(seed=1)[:NUM_WARM_UP], cache_salt="warm up")
    await until_memory_is_there()
    return engine


async def until_memory_is_there() -> None:
    """An idle engine touches its KV pool, as vLLM does before it is ready."""
    process, before = psutil.Process(), 0
    while (now := process.memory_info().rss) > before:
        before = now
        await asyncio.sleep(0.2)


def config(quantization: Quantization | None = None) -> EngineConfig:
    settings = config_from_env()
    if quantization is not None:
        settings = dataclasses.replace(settings, quantization=quantization)
    if settings.model == DEFAULT_MODEL:
        default_model.put_into_store()
    source = model_source(settings.model)
    return dataclasses.replace(
        settings,
        model=str(source.folder()),
        served_model_name=settings.served_model_name or source.served_name,
    )


async def bench(settings: EngineConfig, repeat: int) -> None:
    started = time.monotonic()
    engine = await load(settings)
    info = engine.model_info()
    print(f"{info}\nloaded and warm after {time.monotonic() - started:.1f} s", flush=True)
    runs = []
    for index in range(repeat):
        runs.append(await measure(engine, workload(), cache_salt=f"run {index}"))
        print(runs[-1], flush=True)
    engine.close()
    file = record.append(
        "engine",
        {
            "model": dataclasses.asdict(info),
            "config": dataclasses.asdict(dataclasses.replace(settings, model=info.model_name)),
            "runs": [dataclasses.asdict(run) for run in runs],
        },
    )
    print(f"appended to {file.relative_to(record.ROOT)}")


async def answer_commands(settings: EngineConfig) -> None:
    """For turns.py: one run, and its result in one line, for each line of JSON that comes in."""
    engine = await load(settings)
    max_model_len = engine.model_info().max_model_len
    print("READY", flush=True)
    for index, line in enumerate(sys.stdin):
        options = json.loads(line)
        run = await measure(
            engine,
            requests_of(options.get("workload", "mixed"), max_model_len, options.get("requests")),
            cache_salt=f"run {index}",
            concurrency=options.get("concurrency"),
        )
        print("RESULT", json.dumps(dataclasses.asdict(run)), flush=True)
    engine.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    add_repeat(parser, 3, "runs")
    parser.add_argument("--quantization", choices=get_args(Quantization))
    parser.add_argument("--on-command", action="store_true", help="one run for each line of stdin")
    arguments = parser.parse_args()
    settings = config(arguments.quantization)
    work = answer_commands(settings) if arguments.on_command else bench(settings, arguments.repeat)
    asyncio.run(work)
