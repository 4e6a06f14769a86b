"""How well a plan foretells a run: TTFT, ITL and throughput, predicted and measured.

    python benchmarks/bench_plan.py [--rate R] [--requests N]

The engine serves two workloads of Poisson arrivals, recorded. A cost model is fitted to the first
alone; the second, of other arrivals and other lengths, is then predicted from its arrivals and
compared. Takes the CB_* settings; without CB_MODEL it takes the default model. Needs a machine
that does nothing else. Appends to results/plan.jsonl.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import random
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import record
from bench_engine import config, load
from workload import OUTPUT_TOKENS, PROMPT_TOKENS, TOKEN_IDS

from cb_backend.core.sampling_params import SamplingParams
from cb_backend.planning.capacity import Prediction, percentiles, predict
from cb_backend.planning.cost_model import fit
from cb_backend.planning.recording import Recording, read_recording
from cb_backend.planning.replay import Replay
from cb_backend.planning.report import describe_cost
from cb_backend.planning.trace import Trace, trace_of
from cb_backend.serving.async_engine import AsyncEngine
from cb_backend.serving.engine_client import GenerateRequest

TARGET = 0.15  # of the measured value


@dataclasses.dataclass(frozen=True)
class Workload:
    """Requests with the seconds after the start at which they come."""

    arrivals: tuple[float, ...]
    requests: tuple[tuple[tuple[int, ...], int], ...]  # prompt token ids, output tokens

    @staticmethod
    def draw(seed: int, num_requests: int, rate: float) -> Workload:
        rng, clock, arrivals, requests = random.Random(seed), 0.0, [], []
        for _ in range(num_requests):
            clock += rng.expovariate(rate)
            length = rng.randint(*PROMPT_TOKENS)
            prompt = tuple(rng.randrange(*TOKEN_IDS) for _ in range(length))
            arrivals.append(clock)
            requests.append((prompt, rng.randint(*OUTPUT_TOKENS)))
        return Workload(tuple(arrivals), tuple(requests))


@dataclasses.dataclass(frozen=True)
class Measured:
    ttft_s: list[float]
    gaps_s: list[float]
    seconds: float  # from the first arrival to the last token
    num_output_tokens: int

    def as_prediction(self) -> Prediction:
        rate = self.num_output_tokens / self.seconds
        return Prediction(1, percentiles(self.ttft_s), percentiles(self.gaps_s), rate, rate)


async def serve(engine: AsyncEngine, workload: Workload) -> Measured:
    started = time.monotonic()

    async def one(arrival: float, prompt: tuple[int, ...], count: int) -> tuple[float, list[float]]:
        await asyncio.sleep(started + arrival - time.monotonic())
        submitted = time.monotonic()
        request = GenerateRequest(
            prompt_token_ids=list(prompt),
            params=SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True),
        )
        return submitted, [event.time async for event in engine.generate(request)]

    served = await asyncio.gather(
        *(
            one(arrival, prompt, count)
            for arrival, (prompt, count) in zip(workload.arrivals, workload.requests, strict=True)
        )
    )
    return Measured(
        ttft_s=[times[0] - submitted for submitted, times in served],
        gaps_s=[b - a for _, times in served for a, b in pairwise(times)],
        seconds=max(times[-1] for _, times in served) - min(submitted for submitted, _ in served),
        num_output_tokens=sum(len(times) for _, times in served),
    )


async def run_recorded(workload: Workload, path: Path) -> Measured:
    """A new engine for each run: its cache is cold and its file its own."""
    engine = await load(dataclasses.replace(config(), record=str(path)))
    measured = await serve(engine, workload)
    engine.close()
    return measured


def read_back(path: Path) -> Recording:
    recording = read_recording(path)
    replayed = Replay(recording).play()
    assert not replayed.difference, replayed.difference
    print(f"{path.stat().st_size} bytes recorded, {replayed.num_steps} steps replay identically")
    return recording


def without_warm_up(recording: Recording, workload: Workload) -> Trace:
    """The trace of the workload alone: what came before it warmed the engine up."""
    trace = trace_of(recording)
    return dataclasses.replace(trace, requests=trace.requests[-len(workload.requests) :])


def compare(predicted: Prediction, measured: Prediction) -> dict[str, dict[str, float]]:
    pairs = {
        f"{name} p{share} ms": (1e3 * ours[share], 1e3 * theirs[share])
        for name, ours, theirs in (
            ("TTFT", predicted.ttft_s, measured.ttft_s),
            ("ITL", predicted.itl_s, measured.itl_s),
        )
        for share in ours
    }
    pairs["output tok/s"] = (predicted.output_tokens_per_s, measured.output_tokens_per_s)
    return {
        name: {"predicted": guess, "measured": truth, "off": guess / truth - 1}
        for name, (guess, truth) in pairs.items()
    }


def show(compared: dict[str, dict[str, float]]) -> None:
    for name, line in compared.items():
        verdict = "" if abs(line["off"]) <= TARGET else f"  beyond {TARGET:.0%}"
        print(
            f"{name:14} predicted {line['predicted']:9.1f}  measured {line['measured']:9.1f}"
            f"  off {line['off']:+.1%}{verdict}"
        )


async def bench(rate: float, num_requests: int) -> None:
    workloads = [Workload.draw(seed, num_requests, rate) for seed in (1, 2)]
    with tempfile.TemporaryDirectory() as name:
        paths = [Path(name) / f"{index}.jsonl" for index in range(2)]
        runs = []
        for workload, path in zip(workloads, paths, strict=True):
            measured = await run_recorded(workload, path)
            runs.append((measured, read_back(path)))
    cost = fit(runs[0][1])
    print(describe_cost(cost))
    results = {}
    for (measured, recording), workload, title in zip(
        runs, workloads, ("the run that was fitted", "the run that was not seen"), strict=True
    ):
        predicted = predict(without_warm_up(recording, workload), recording.header, cost, 1)
        results[title] = compare(predicted, measured.as_prediction())
        print(title)
        show(results[title])
    file = record.append(
        "plan",
        {
            "rate": rate,
            "requests": num_requests,
            "cost": dataclasses.asdict(cost),
            "compared": results["the run that was not seen"],
        },
    )
    print(f"appended to {file.relative_to(record.ROOT)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, default=1.5, help="requests per second (default 1.5)")
    parser.add_argument("--requests", type=int, default=80, help="of each run (default 80)")
    arguments = parser.parse_args()
    asyncio.run(bench(arguments.rate, arguments.requests))
