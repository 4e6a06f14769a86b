"""The kernels at sizes of real models: against float64, and against the time they must take.

A floor is what must be read and written once over the measured bandwidth of a copy, or what must be
multiplied over the measured rate of a product, whichever takes longer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from cb_kernels import (
    RaggedBatch,
    SamplingParameters,
    add_rms_norm,
    gather_blocks,
    gelu_and_mul,
    paged_attention,
    reference,
    rms_norm,
    sample,
    silu_and_mul,
    store_heads,
)
from torch import Tensor

from gpu_check.timing import Run

EPS = 1e-5
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Model:
    """The sizes that a kernel sees of a model. Llama 3 8B's."""

    hidden: int = 4096
    intermediate: int = 14336
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    vocab: int = 128256
    num_layers: int = 32


TINY = Model(256, 512, 4, 2, 64, 1000, 2)


@dataclass(frozen=True, slots=True)
class Correct:
    """`run` gives what `expected` gives in float64, to `tolerance` of each number, and of `least`
    for numbers smaller than that."""

    kernel: str
    shape: str
    run: Run
    expected: Callable[[], Tensor]
    tolerance: float
    least: float = 1e-2


@dataclass(frozen=True, slots=True)
class Timed:
    kernel: str
    shape: str
    make: Callable[[], Run]  # new inputs, and the call
    num_bytes: int  # that a call must read or write
    num_flops: int = 0


@dataclass(frozen=True, slots=True)
class _Attention:
    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    batch: RaggedBatch

    @classmethod
    def of(
        cls, model: Model, rows: list[tuple[int, int]], dtype: torch.dtype, device: torch.device
    ) -> _Attention:
        """Rows as (queries, keys), their blocks in random order."""
        widths = [-(-keys // BLOCK_SIZE) for _, keys in rows]
        order = iter(torch.randperm(sum(widths)).tolist())
        table = torch.zeros(len(rows), max(widths), dtype=torch.int32)
        for row, width in enumerate(widths):
            table[row, :width] = torch.tensor([next(order) for _ in range(width)])
        shape = (sum(widths), BLOCK_SIZE, model.num_kv_heads, model.head_dim)
        starts = [sum(count for count, _ in rows[:i]) for i in range(len(rows) + 1)]
        k_cache, v_cache = (torch.randn(shape, device=device).to(dtype) for _ in range(2))
        q = torch.randn(starts[-1], model.num_heads, model.head_dim, device=device).to(dtype)
        lens = [keys for _, keys in rows]
        return cls(q, k_cache, v_cache, RaggedBatch(table, starts, lens, BLOCK_SIZE, device=device))

    def run(self) -> Tensor:
        scale = self.q.shape[2] ** -0.5
        return paged_attention(self.q, self.k_cache, self.v_cache, self.batch, scale=scale)

    def expected(self) -> Tensor:
        batch = RaggedBatch(
            self.batch.block_table,
            self.batch.query_start_loc,
            self.batch.seq_lens,
            self.batch.block_size,
        )
        caches = self.k_cache.cpu(), self.v_cache.cpu()
        scale = self.q.shape[2] ** -0.5
        return reference.paged_attention(self.q.cpu(), *caches, batch, scale=scale)


def correct(model: Model, device: torch.device) -> Iterator[Correct]:
    """Odd sizes, the dtypes that models have."""
    torch.manual_seed(0)
    for dtype, unit in ((torch.bfloat16, 2**-8), (torch.float16, 2**-11), (torch.float32, 1e-5)):
        name = str(dtype).removeprefix("torch.")
        x, residual = torch.randn(2, 37, model.hidden, device=device).to(dtype)
        weight = torch.randn(model.hidden, device=device).to(dtype)
        yield Correct(
            *("rms_norm", name),
            partial(rms_norm, x, weight, EPS),
            partial(reference.rms_norm, x, weight, EPS),
            unit * 1.02,
        )
        yield Correct(
            *("add_rms_norm", name),
            partial(_first, add_rms_norm, x, residual, weight, EPS),
            partial(_first, reference.add_rms_norm, x, residual, weight, EPS),
            unit * 4,  # the sum may round to its other neighbour
        )
        gate_up = (torch.randn(7, 2 * model.intermediate, device=device) * 3).to(dtype)
        activations: dict[str, Run] = {
            "silu": partial(silu_and_mul, gate_up),
            "gelu": partial(gelu_and_mul, gate_up, tanh=False),
            "gelu_tanh": partial(gelu_and_mul, gate_up, tanh=True),
        }
        for activation, run in activations.items():
            expected = partial(reference.gated, gate_up, activation)
            # Far below zero 1 + erf cancels, and float32 has little left.
            yield Correct(f"{activation}_and_mul", name, run, expected, unit * 1.05, least=0.1)
        rows = [(1, 1), (1, 70), (33, 33), (5, 131), (1, 300)]
        if model is TINY:
            rows = [(1, 1), (3, 19)]
        attention = _Attention.of(model, rows, dtype, device)
        yield Correct(
            "paged_attention", name, attention.run, attention.expected, unit * 2, least=1.0
        )
    yield _shared_prefix(model, device)
    yield _same_bits(model, device)


def _shared_prefix(model: Model, device: torch.device) -> Correct:
    """Long enough, on a GPU, that reading the prefix once pays."""
    rows = [(1, 4200 if device.type == "cuda" else 90)] * 16
    attention = _Attention.of(model, rows, torch.bfloat16, device)
    table = attention.batch.block_table
    shared = rows[0][1] // BLOCK_SIZE - 1
    table[:, :shared] = table[0, :shared].clone()
    return Correct(
        *("paged_attention", "shared prefix"),
        attention.run,
        attention.expected,
        2**-7,
        least=1.0,
    )


def _same_bits(model: Model, device: torch.device) -> Correct:
    """A token alone and at the end of a chunk beside another row, in a deterministic batch."""
    keys = 2100 if device.type == "cuda" else 90
    beside = _Attention.of(model, [(30, keys), (1, 70)], torch.bfloat16, device)
    beside.batch.deterministic = True
    table = beside.batch.block_table[:1]
    batch = RaggedBatch(table, [0, 1], [keys], BLOCK_SIZE, device=device, deterministic=True)
    alone = replace(beside, q=beside.q[29:30], batch=batch)
    return Correct(
        *("paged_attention", "deterministic"),
        alone.run,
        lambda: beside.run()[29:30].double().cpu(),
        0.0,
    )


def _first(kernel: Callable[..., tuple[Tensor, Tensor]], *args: object) -> Tensor:
    return kernel(*args)[0]


def timed(model: Model, device: torch.device, *, scale: int = 1) -> Iterator[Timed]:
    """Each at several sizes, divided by `scale`."""
    for num_tokens in (16, 256, 4096, 16384):
        yield from _timed_rows(model, device, max(1, num_tokens // scale))
    for num_rows in (1, 16, 256):
        for temperature, top_k, top_p in ((0.0, 0, 1.0), (1.0, 0, 1.0), (1.0, 0, 0.95), (1, 50, 1)):
            yield _timed_sampling(
                *(model, device, max(1, num_rows // scale)),
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
            )
    yield _timed_blocks(model, device, max(2, 256 // scale))
    for num_rows, num_keys in ((1, 4096), (16, 512), (16, 4096), (64, 4096), (1, 131072)):
        rows = [(1, max(1, num_keys // scale))] * max(1, num_rows // scale)
        yield _timed_attention("attention, decode", model, device, rows)
    for num_tokens in (2048, 8192):
        rows = [(max(1, num_tokens // scale),) * 2]
        yield _timed_attention("attention, prefill", model, device, rows)


def _timed_rows(model: Model, device: torch.device, num_tokens: int) -> Iterator[Timed]:
    shape = f"T={num_tokens}"
    size = num_tokens * model.hidden

    def rows(width: int) -> Tensor:
        return torch.randn(num_tokens, width, device=device).bfloat16()

    weight = torch.ones(model.hidden, device=device).bfloat16()

    def make_norm() -> Run:
        return partial(rms_norm, rows(model.hidden), weight, EPS)

    def make_add() -> Run:
        return partial(add_rms_norm, rows(model.hidden), rows(model.hidden), weight, EPS)

    def make_silu() -> Run:
        return partial(silu_and_mul, rows(2 * model.intermediate))

    def make_heads() -> Run:
        heads = rows(num_heads * model.head_dim).view(num_tokens, num_heads, -1)
        blocks = -(-num_tokens // BLOCK_SIZE)
        cache = (2, blocks, BLOCK_SIZE, model.num_kv_heads, model.head_dim)
        k_cache, v_cache = torch.empty(cache, dtype=torch.bfloat16, device=device)
        turn = rows(model.head_dim)[:, None]
        slots = torch.randperm(num_tokens).to(device)
        half = model.head_dim // 2
        return partial(store_heads, heads, k_cache, v_cache, slots, turns=(turn, turn), half=half)

    num_heads = model.num_heads + 2 * model.num_kv_heads
    yield Timed("rms_norm", shape, make_norm, 4 * size)
    yield Timed("add_rms_norm", shape, make_add, 8 * size)
    yield Timed("silu_and_mul", shape, make_silu, 6 * num_tokens * model.intermediate)
    yield Timed("store_heads", shape, make_heads, 4 * num_tokens * num_heads * model.head_dim)


def _timed_sampling(
    model: Model,
    device: torch.device,
    num_rows: int,
    *,
    temperature: float,
    top_k: int,
    top_p: float,
) -> Timed:
    def make() -> Run:
        def share(value: float) -> Tensor:
            return torch.full((num_rows,), float(value), device=device)

        whole = torch.arange(num_rows, device=device)
        parameters = SamplingParameters(
            temperature=share(temperature),
            top_k=torch.full_like(whole, top_k),
            top_p=share(top_p),
            min_p=share(0.0),
            seeds=whole,
            positions=whole,
        )
        logits = (torch.randn(num_rows, model.vocab, device=device) * 3).bfloat16()
        return partial(sample, logits, parameters)

    name = f"sample T={temperature:g} k={top_k} p={top_p:g}"
    return Timed(name, f"R={num_rows}", make, 2 * num_rows * model.vocab)


def _timed_blocks(model: Model, device: torch.device, num_blocks: int) -> Timed:
    shape = (model.num_layers, 2, num_blocks, BLOCK_SIZE, model.num_kv_heads, model.head_dim)

    def make() -> Run:
        pool = torch.empty(shape, dtype=torch.bfloat16, device=device)
        return partial(gather_blocks, pool, 2, torch.arange(0, num_blocks, 2, device=device))

    num_bytes = 2 * math.prod(shape)  # of half the pool, read and written
    return Timed("gather_blocks", f"{num_blocks // 2} blocks", make, num_bytes)


def _timed_attention(
    kernel: str, model: Model, device: torch.device, rows: list[tuple[int, int]]
) -> Timed:
    """Rows are alike."""
    queries, keys = rows[0]

    def make() -> Run:
        return _Attention.of(model, rows, torch.bfloat16, device).run

    num_bytes = (
        4 * len(rows) * model.head_dim * (keys * model.num_kv_heads + queries * model.num_heads)
    )
    # Two products over half of the square.
    flops = 2 * queries * keys * model.head_dim * model.num_heads if queries > 1 else 0
    return Timed(kernel, f"{len(rows)} x {keys}", make, num_bytes, flops)
