"""How well a plan foretells a run: TTFT, ITL and throughput, predicted and measured.

    python benchmarks/bench_plan.py [--rate R] [--requests N] [--rounds N]

The engine serves Poisson arrivals in rounds, recorded. A cost model is fitted to every other round;
those between, of other arrivals and other lengths, are then predicted from their arrivals and
compared. In turns, because a shared machine is not as fast in one minute as in the next. Takes the
CB_* settings; without CB_MODEL it takes the default model. Appends to results/plan.jsonl.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import random
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import record
from bench_engine import config, load
from workload import OUTPUT_TOKENS, PROMPT_TOKENS, TOKEN_IDS

from cb_backend.core.sampling_params import SamplingParams
from cb_backend.planning.capacity import percentiles
from cb_backend.planning.cost_model import FEATURES, CostModel, fit
from cb_backend.planning.recording import Arrival, Recording, read_recording
from cb_backend.planning.replay import Replay
from cb_backend.planning.report import describe_cost
from cb_backend.planning.trace import trace_of
from cb_backend.planning.virtual_replica import VirtualReplica
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


async def run_rounds(workloads: Sequence[Workload], path: Path) -> list[Measured]:
    """Each round starts on an idle engine; no two prompts begin alike."""
    engine = await load(dataclasses.replace(config(), record=str(path)))
    measured = [await serve(engine, workload) for workload in workloads]
    engine.close()
    return measured


def split(recording: Recording, workloads: Sequence[Workload]) -> list[Recording]:
    """The rounds, without the warm-up before them."""
    starts = [i for i, entry in enumerate(recording.entries) if isinstance(entry, Arrival)]
    counts = [len(workload.requests) for workload in workloads]
    firsts = [starts[sum(counts[i:]) * -1] for i in range(len(counts))]
    return [
        Recording(recording.header, recording.entries[first:last])
        for first, last in pairwise([*firsts, len(recording.entries)])
    ]


def compare(
    recordings: Sequence[Recording], measured: Sequence[Measured], cost: CostModel
) -> dict[str, dict[str, float]]:
    """Rounds one by one on the virtual clock, then all their requests together."""
    header = recordings[0].header
    served, seconds = [], 0.0
    for recording in recordings:
        trace = trace_of(recording)
        of_round = VirtualReplica(header, cost, trace.block_size).run(trace.requests)
        served += of_round
        seconds += max(request.times[-1] for request in of_round) - trace.requests[0][0].time
    num_output_tokens = sum(run.num_output_tokens for run in measured)
    ttft = percentiles([request.ttft for request in served])
    itl = percentiles([gap for request in served for gap in request.gaps])
    true_ttft = percentiles([value for run in measured for value in run.ttft_s])
    true_itl = percentiles([value for run in measured for value in run.gaps_s])
    pairs = {
        **{f"TTFT p{n} ms": (1e3 * ttft[n], 1e3 * true_ttft[n]) for n in ttft},
        **{f"ITL p{n} ms": (1e3 * itl[n], 1e3 * true_itl[n]) for n in itl},
        "output tok/s": (
            num_output_tokens / seconds,
            num_output_tokens / sum(run.seconds for run in measured),
        ),
    }
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


def bench(rate: float, num_requests: int, num_rounds: int) -> None:
    workloads = [Workload.draw(seed, num_requests, rate) for seed in range(num_rounds)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.jsonl"
        measured = asyncio.run(run_rounds(workloads, path))
        recording, num_bytes = read_recording(path), path.stat().st_size
    replayed = Replay(recording).play()
    assert not replayed.difference, replayed.difference
    print(f"{num_bytes} bytes recorded, {replayed.num_steps} steps replay identically")
    rounds = split(recording, workloads)
    entries = [entry for of_round in rounds[::2] for entry in of_round.entries]
    cost = fit(Recording(recording.header, tuple(entries)))
    print(describe_cost(cost))
    print("rounds that were fitted")
    show(compare(rounds[::2], measured[::2], cost))
    print("rounds that were not seen")
    compared = compare(rounds[1::2], measured[1::2], cost)
    show(compared)
    file = record.append(
        "plan",
        {
            "rate": rate,
            "requests": num_requests,
            "rounds": num_rounds,
            "cost": dict(zip(FEATURES, cost.seconds, strict=True)),
            "compared": compared,
        },
    )
    print(f"appended to {file.relative_to(record.ROOT)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, default=1.0, help="requests per second (default 1)")
    parser.add_argument("--requests", type=int, default=40, help="of each round (default 40)")
    parser.add_argument("--rounds", type=int, default=8, help="half of them fitted (default 8)")
    arguments = parser.parse_args()
    bench(arguments.rate, arguments.requests, arguments.rounds)
