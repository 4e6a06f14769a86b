"""How near the engine comes to what the machine allows: one stream alone, and one long prompt.

    python benchmarks/bench_roofline.py [--repeat N]

One stream: the time between two tokens against that of reading the layers' weights and the head
once, the median of each. Weights count the bytes of their dtype, though bfloat16 lies in 12 bits:
the share can be above 100%. On a shared host memory's speed changes by half within seconds, so
short answers and readings of memory alternate, and an answer counts if those beside it agree.
A prompt of 4,000 tokens, in chunks as the engine cuts it: the rate of its layers' matrix products
against a large product's, and the time to its first token.
CPU. Takes the CB_* settings; appends to results/roofline.jsonl.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # what the engine sets, see factory.py

import record
import torch
from bench_engine import config
from cb_kernels import Int8Linear, RaggedBatch
from linear_shapes import layers_size, spec_of, streamed_size
from machine_peak import gemm_flops, usual_read_bandwidth
from torch import nn
from turns import OURS, Contestant, add_repeat, end_as_by_ctrl_c
from workload import requests_of

from cb_backend.config import EngineConfig
from cb_backend.runtime.attention import StepAttention
from cb_backend.runtime.kv_cache import KVCache
from cb_backend.runtime.models.decoder import Decoder
from cb_backend.runtime.models.linear import Linear
from cb_backend.runtime.models.loader import load_model

CPU = torch.device("cpu")
BLOCK_SIZE = 32
STREAM_TARGET, PROMPT_TARGET = 0.85, 0.80
NUM_ANSWERS = 24  # of one stream, each between two readings of memory
STEADY = 0.1  # of each other, two readings


@dataclasses.dataclass(frozen=True)
class Answer:
    read_gb_s: float  # beside it
    token_ms: float  # through the engine: the median of its tokens
    share: float  # of a token: reading the weights


@dataclasses.dataclass(frozen=True)
class Turn:
    answers: list[Answer]  # of one stream, those that count
    gemm_gflop_s: float
    prompt_ttft_s: float  # through the engine
    prompt_linears_gflop_s: float  # while they run
    prompt_linears_share: float  # of a large product's rate


@contextmanager
def timed_linears(layers: nn.Module) -> Iterator[list[float]]:
    """The seconds of each product that runs in `layers` meanwhile."""
    started, seconds = [0.0], [0.0]

    def before(*_: object) -> None:
        started[0] = time.perf_counter()

    def after(*_: object) -> None:
        seconds[0] += time.perf_counter() - started[0]

    handles = [
        handle
        for module in layers.modules()
        if isinstance(module, Linear)
        for handle in (
            module.register_forward_pre_hook(before),
            module.register_forward_hook(after),
        )
    ]
    try:
        yield seconds
    finally:
        for handle in handles:
            handle.remove()


def prefill(model: Decoder, prompt: list[int], chunk: int) -> float:
    """Seconds of the layers' products over a prompt, cut into chunks as a step's budget does."""
    num_blocks = -(-len(prompt) // BLOCK_SIZE)
    cache = KVCache(model.geometry, num_blocks, BLOCK_SIZE, dtype=model.dtype, device=CPU)
    token_ids = torch.tensor(prompt)
    model._plain = None  # one by one: the same products, and only so can they be timed
    with torch.inference_mode(), timed_linears(model.layers) as seconds:
        for start in range(0, len(prompt), chunk):
            positions = torch.arange(start, min(start + chunk, len(prompt)))
            batch = RaggedBatch(
                block_table=torch.arange(num_blocks)[None],
                query_start_loc=[0, len(positions)],
                seq_lens=[start + len(positions)],
                block_size=BLOCK_SIZE,
            )
            attention = StepAttention(cache, batch, positions)  # block i is the table's i-th
            last = torch.tensor([len(positions) - 1])
            model.forward(token_ids[positions], positions, attention, last)
    return seconds[0]


def take_answers(engine: Contestant, weight_bytes: int) -> list[Answer]:
    answers, before = [], usual_read_bandwidth()
    for _ in range(NUM_ANSWERS):
        token_ms = engine.run(workload="single")["itl_ms"]["p50"]
        after = usual_read_bandwidth()
        read_bytes = (before + after) / 2
        if abs(after - before) < STEADY * read_bytes:
            share = weight_bytes / read_bytes / (1e-3 * token_ms)
            answers.append(Answer(1e-9 * read_bytes, token_ms, share))
        before = after
    return answers


def take_turn(engine: Contestant, model: Decoder, prompt: list[int], chunk: int) -> Turn:
    rounded = isinstance(model.lm_head.kernel, Int8Linear)
    weight_bytes = streamed_size(model.spec) * (1 if rounded else model.dtype.itemsize)
    answers = take_answers(engine, weight_bytes)
    flops = gemm_flops(model.dtype)
    ttft_ms = engine.run(workload="long", requests=1)["ttft_ms"]["p50"]
    products = 2 * len(prompt) * layers_size(model.spec)
    linears = products / prefill(model, prompt, chunk)
    # The machine's best in this turn: what disturbs only ever makes it look slower.
    flops = max(flops, gemm_flops(model.dtype))
    return Turn(
        answers=answers,
        gemm_gflop_s=1e-9 * flops,
        prompt_ttft_s=1e-3 * ttft_ms,
        prompt_linears_gflop_s=1e-9 * linears,
        prompt_linears_share=linears / flops,
    )


def turn_text(turn: Turn, num_prompt: int) -> str:
    return (
        f"one stream: {answers_text(turn.answers)}\n"
        f"    {num_prompt} tokens: first token after {turn.prompt_ttft_s:.2f} s; linears"
        f" {turn.prompt_linears_gflop_s:.0f} GFLOP/s, {turn.prompt_linears_share:.0%} of a large"
        f" product's {turn.gemm_gflop_s:.0f}"
    )


def answers_text(answers: Sequence[Answer]) -> str:
    """By the speed of memory, on which the share depends."""
    if not answers:
        return "no answer between readings of memory that agree"
    middle = (min(each.read_gb_s for each in answers) + max(e.read_gb_s for e in answers)) / 2
    halves = (
        [each for each in answers if each.read_gb_s < middle],
        [each for each in answers if each.read_gb_s >= middle],
    )
    return "; ".join(
        f"{statistics.median(each.token_ms for each in half):.2f} ms a token where memory gives"
        f" {statistics.median(each.read_gb_s for each in half):.0f} GB/s,"
        f" {shares_text([each.share for each in half])} of them reading the weights once"
        for half in halves
        if half
    )


def shares_text(shares: Sequence[float]) -> str:
    return (
        f"{statistics.median(shares):.0%} ({min(shares):.0%} to {max(shares):.0%}, {len(shares)})"
    )


def bench(settings: EngineConfig, repeat: int) -> None:
    spec_of(settings.model)  # or ends here, with the reason
    if settings.num_threads is not None:
        torch.set_num_threads(settings.num_threads)
    with torch.inference_mode():
        model, _ = load_model(dataclasses.replace(settings, implementation="native"), CPU)
    assert isinstance(model, Decoder)
    ((prompt, _),) = requests_of("long", settings.max_model_len or model.geometry.max_context, 1)
    prefill(model, prompt[: settings.max_num_batched_tokens], settings.max_num_batched_tokens)
    turns = []
    engine = Contestant("cb_backend", OURS)
    try:
        engine.load()
        for _ in range(repeat):
            turns.append(take_turn(engine, model, prompt, settings.max_num_batched_tokens))
            print(turn_text(turns[-1], len(prompt)), flush=True)
    finally:
        engine.close()
    shares = [turn.prompt_linears_share for turn in turns]
    print(
        f"of {repeat} turns, targets {STREAM_TARGET:.0%} and {PROMPT_TARGET:.0%}:"
        f" one stream {answers_text([each for turn in turns for each in turn.answers])};"
        f" a long prompt's linears {shares_text(shares)} of a large product"
    )
    measured = {
        "dtype": str(model.dtype),
        "threads": torch.get_num_threads(),
        "prompt_tokens": len(prompt),
        "turns": [dataclasses.asdict(turn) for turn in turns],
    }
    print(f"appended to {record.append('roofline', measured).relative_to(record.ROOT)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_repeat(parser, 3, "turns")
    arguments = parser.parse_args()
    end_as_by_ctrl_c()
    bench(config(), arguments.repeat)
