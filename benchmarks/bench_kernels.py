"""The CPU's kernels one by one, as a share of what the machine can do at most.

    python benchmarks/bench_kernels.py [linears|attention|pointwise ...]

linears: the model's products for several numbers of rows; the packed kernels in C, of the model's
dtype and of int8, oneDNN's packed one and torch's. Many rows as GFLOP/s against a large product in
the same run; one row, which only reads weights, as GB/s of its dtype against streaming memory,
though C has bfloat16 in 12 bits. Weights are as cold as in a model: copies rotate.
attention: decoding rows and chunks of prompts over the paged cache, C and torch; blocks lie in no
order, as in a pool that has been used for a while, and one row's of all layers fit a large cache.
pointwise: norm and rotation, C and torch.
Takes the CB_* settings; appends to results/kernels.jsonl.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # what the engine sets, see factory.py

import record
import torch
import torch.nn.functional as F
from bench_engine import config
from cb_kernels import (
    Int8Linear,
    RaggedBatch,
    pack_linear,
    paged_attention,
    rms_norm,
    rope,
    torch_impl,
)
from cb_kernels.cpu.library import kernels
from linear_shapes import LinearShape, layer_shapes, lm_head_shape, spec_of
from machine_peak import best_seconds, gemm_flops, onednn_linear, read_bandwidth
from torch import Tensor

from cb_backend.runtime.device import choose_dtype
from cb_backend.runtime.kv_cache import KVCache
from cb_backend.runtime.models.interface import ModelGeometry
from cb_backend.runtime.models.model_config import read_config
from cb_backend.runtime.models.spec import DecoderSpec

CPU = torch.device("cpu")
ROWS = (1, 8, 32, 64, 512)
COLD_BYTES = 2**28  # of weights that rotate: many times what caches hold
BLOCK_SIZE = 32
DECODING = ((1, 512), (16, 512), (64, 256))  # rows, keys of each
CHUNKS = ((512, 0), (512, 3584))  # new tokens of one prompt, keys before them

INT8 = "C int8"

Product = Callable[[Tensor], Tensor]
Results = list[dict[str, object]]


@dataclass(frozen=True)
class Machine:
    flops: float  # a second, of a large product
    read_bytes: float  # a second

    @classmethod
    def measured(cls, dtype: torch.dtype, when: str) -> Machine:
        """Before and after the rest: where the two differ, the shares are not to be trusted."""
        machine = cls(gemm_flops(dtype), read_bandwidth())
        print(
            f"{when}: a large product {1e-9 * machine.flops:.0f} GFLOP/s,"
            f" reading memory {1e-9 * machine.read_bytes:.1f} GB/s",
            flush=True,
        )
        return machine


def bench_linears(spec: DecoderSpec, dtype: torch.dtype, machine: Machine) -> Results:
    results: Results = []
    for shape in (*layer_shapes(spec), lm_head_shape(spec)):
        for name, copies in linear_variants(shape, dtype).items():
            for rows in ROWS:
                x = torch.randn(rows, shape.depth).to(dtype)
                seconds = best_seconds(partial(apply_each, copies, x)) / len(copies)
                result = {
                    "linear": shape.name,
                    "kernel": name,
                    "rows": rows,
                    "us": 1e6 * seconds,
                    "gflop_s": 2e-9 * rows * shape.size / seconds,
                    "gb_s": 1e-9 * shape.size * (1 if name == INT8 else dtype.itemsize) / seconds,
                }
                results.append(result)
                print(f"{shape.name:8} {shape.depth}x{shape.width} {linear_text(result, machine)}")
    return results


def linear_variants(shape: LinearShape, dtype: torch.dtype) -> dict[str, list[Product]]:
    """Each kernel with as many copies of the weight as make it cold. The gated product in C does
    silu(gate) * up as well; the others' figures are of the product alone."""
    num_copies = max(2, -(-COLD_BYTES // (shape.size * dtype.itemsize)))
    weight = torch.randn(shape.width, shape.depth).to(dtype)

    def copies(make: Callable[[Tensor], Product | None]) -> list[Product]:
        made = [make(weight.clone()) for _ in range(num_copies)]
        return [product for product in made if product is not None]

    variants = {
        "C": copies(lambda w: pack_linear(w, None, gated=shape.gated)),
        INT8: copies(lambda w: int8_linear(w, gated=shape.gated)),
        "oneDNN": copies(onednn_linear),
        "torch": copies(lambda w: lambda x: F.linear(x, w)),
    }
    return {name: found for name, found in variants.items() if found}


def int8_linear(weight: Tensor, *, gated: bool) -> Product | None:
    linear = Int8Linear(weight, None, gated=gated)
    return None if linear.packed is None else linear


def apply_each(products: Sequence[Product], x: Tensor) -> None:
    for product in products:
        product(x)


def linear_text(result: dict[str, object], machine: Machine) -> str:
    rows, gflop_s, gb_s = result["rows"], float(str(result["gflop_s"])), float(str(result["gb_s"]))
    if rows == 1:
        speed = f"{gb_s:6.1f} GB/s, {1e9 * gb_s / machine.read_bytes:.0%} of reading memory"
    else:
        speed = f"{gflop_s:6.0f} GFLOP/s, {1e9 * gflop_s / machine.flops:.0%} of a large product"
    return f"rows {rows:3}  {result['kernel']:7} {result['us']:8.0f} us {speed}"


def bench_attention(spec: DecoderSpec, dtype: torch.dtype, machine: Machine) -> Results:
    results: Results = []
    cases = [(rows, 1, keys - 1) for rows, keys in DECODING]
    cases += [(1, new, before) for new, before in CHUNKS]
    for rows, new, before in cases:
        num_keys = new + before
        blocks = -(-num_keys // BLOCK_SIZE)
        cache = filled_cache(spec, rows * blocks, dtype)
        # The kernels in C may have an order of their own within a block; torch has the plain one.
        plain = [(k.permute(1, 2, 0, 3), v.permute(1, 2, 0, 3)) for k, v in cache.pool]
        batch = RaggedBatch(
            block_table=torch.randperm(rows * blocks).view(rows, blocks),
            query_start_loc=[new * row for row in range(rows + 1)],
            seq_lens=[num_keys] * rows,
            block_size=BLOCK_SIZE,
        )
        q = torch.randn(rows * new, spec.num_heads, spec.head_dim).to(dtype)
        variants = (
            ("C", paged_attention, cache.layers),
            ("torch", torch_impl.paged_attention, plain),
        )
        for name, attend, layers in variants:
            if name == "C" and kernels() is None:
                continue
            seconds = attention_seconds(attend, spec, layers, batch, q)
            pairs = rows * (new * before + new * (new + 1) / 2)  # of a query and a key it sees
            kv_bytes = 2 * rows * num_keys * spec.num_kv_heads * spec.head_dim * dtype.itemsize
            result = {
                "attention": f"{rows} rows of {new} new tokens after {before}",
                "kernel": name,
                "us": 1e6 * seconds,
                "gflop_s": 4e-9 * pairs * spec.num_heads * spec.head_dim / seconds,
                "gb_s": 1e-9 * kv_bytes / seconds,
            }
            results.append(result)
            print(
                f"attention, {result['attention']}  {name:5} {result['us']:8.0f} us a layer "
                f" {result['gflop_s']:6.0f} GFLOP/s  {result['gb_s']:5.1f} GB/s of K and V,"
                f" {kv_bytes / seconds / machine.read_bytes:.0%} of reading memory"
            )
    return results


def filled_cache(spec: DecoderSpec, num_blocks: int, dtype: torch.dtype) -> KVCache:
    """Of all layers: one after the other is read, so that each is cold."""
    geometry = ModelGeometry(
        num_layers=len(spec.layers),
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        vocab_size=spec.vocab_size,
        max_context=spec.max_context,
    )
    cache = KVCache(geometry, num_blocks, BLOCK_SIZE, dtype=dtype, device=CPU)
    cache.pool.normal_()
    return cache


def attention_seconds(
    attend: Callable[..., Tensor],
    spec: DecoderSpec,
    layers: Sequence[tuple[Tensor, Tensor]],
    batch: RaggedBatch,
    q: Tensor,
) -> float:
    """Of one layer."""
    options = {"sliding_window": None, "soft_cap": None, "sinks": None}

    def all_layers() -> None:
        for k_cache, v_cache in layers:
            attend(q, k_cache, v_cache, batch, scale=spec.attention_scale, **options)

    return best_seconds(all_layers) / len(layers)


def bench_pointwise(spec: DecoderSpec, dtype: torch.dtype, machine: Machine) -> Results:
    results: Results = []
    weight = torch.ones(spec.hidden_size, dtype=dtype)
    half = spec.head_dim // 2
    for rows in ROWS:
        x = torch.randn(rows, spec.hidden_size).to(dtype)
        qk = torch.randn(rows, spec.num_heads + spec.num_kv_heads, spec.head_dim).to(dtype)
        cos, sin = torch.randn(2, rows, 1, spec.head_dim).to(dtype)
        operations: dict[tuple[str, str], Callable[[], object]] = {
            ("rms_norm", "C"): partial(rms_norm, x, weight, spec.norm_eps),
            ("rms_norm", "torch"): partial(F.rms_norm, x, weight.shape, weight, spec.norm_eps),
            ("rope", "C"): partial(rope, qk, cos, sin, half),
            ("rope", "torch"): partial(torch_impl.rope, qk, cos, sin, half),
        }
        for (operation, name), run in operations.items():
            if name == "C" and kernels() is None:
                continue
            us = 1e6 * best_seconds(run)
            results.append({"operation": operation, "kernel": name, "rows": rows, "us": us})
            print(f"{operation:8} rows {rows:3}  {name:5} {us:8.1f} us")
    return results


BENCHES = {"linears": bench_linears, "attention": bench_attention, "pointwise": bench_pointwise}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("benches", nargs="*", metavar="BENCH", help=f"of {', '.join(BENCHES)}")
    chosen = parser.parse_args().benches or list(BENCHES)
    if unknown := set(chosen) - set(BENCHES):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    settings = config()
    if settings.num_threads is not None:
        torch.set_num_threads(settings.num_threads)
    spec = spec_of(settings.model)
    stored = getattr(read_config(Path(settings.model)), "dtype", None)
    dtype = choose_dtype(settings.dtype, stored, CPU)
    print(f"{dtype}, {torch.get_num_threads()} threads")
    with torch.inference_mode():
        before = Machine.measured(dtype, "before")
        measured = {name: BENCHES[name](spec, dtype, before) for name in chosen}
        after = Machine.measured(dtype, "after")
    file = record.append(
        "kernels",
        {
            "dtype": str(dtype),
            "threads": torch.get_num_threads(),
            "before": asdict(before),
            "after": asdict(after),
            **measured,
        },
    )
    print(f"appended to {file.relative_to(record.ROOT)}")


if __name__ == "__main__":
    main()
