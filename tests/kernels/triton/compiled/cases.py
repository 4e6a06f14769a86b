"""The launches that the compile gate makes: every row of the launch table, as models would use it.

A case calls the public operations on tensors that have no memory. Sizes are those of real models,
since what the JIT knows of them (divisible by 16, say) decides what it compiles.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from cb_kernels import (
    LogitEdits,
    SamplingParameters,
    add_rms_norm,
    copy_blocks,
    edit_logits,
    gather_blocks,
    gelu_and_mul,
    invariant_linear,
    rms_norm,
    rope,
    sample,
    scatter_blocks,
    silu_and_mul,
    store_heads,
    store_kv,
)
from cb_kernels.triton.chips import CHIPS
from cb_kernels.triton.launch import Compilation, compile_only
from torch import Tensor

from tests.kernels.triton.compiled.attention_cases import (
    CHUNKS,
    DECODING,
    Model,
    attention,
    shared_prefix,
)
from tests.kernels.triton.compiled.expert_cases import add, choose, products

ALL_CHIPS = tuple(CHIPS)
FLOAT8 = torch.float8_e4m3fn
FLOAT8_CHIPS = ("sm_90", "sm_100")  # sm_80 has no such numbers, gfx942 others of its own


@dataclass(frozen=True, slots=True)
class Case:
    """`wide`: none of its loads of global memory takes less than 4 bytes, and some take 16.
    `wgmma`: it multiplies matrices with warp groups on sm_90."""

    name: str
    run: Callable[[], object]
    chips: tuple[str, ...] = ALL_CHIPS
    wide: bool = False
    wgmma: bool = False


@functools.cache
def compiled(case: Case, chip: str) -> Compilation:
    with compile_only(CHIPS[chip]) as compilation:
        case.run()
    return compilation


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


SLOTS = tensor(64, dtype=torch.int64)


def _norm_cases() -> list[Case]:
    def norm(width: int) -> None:
        rms_norm(tensor(64, width), tensor(width), 1e-5)

    def add(width: int) -> None:
        add_rms_norm(tensor(64, width), tensor(64, width), tensor(width), 1e-5)

    return [
        Case("rms_norm 128", lambda: norm(128)),  # the weight alone is narrow: 2 bytes a thread
        Case(
            "rms_norm heads of 128",
            lambda: rms_norm(tensor(64, 48, 128)[:, :40], tensor(128), 1e-5),
        ),
        *(
            Case(f"rms_norm {width}", partial(norm, width), wide=True)
            for width in (576, 1024, 4096, 5120, 16384)
        ),
        Case(
            "rms_norm 4096 float32 weight",
            lambda: rms_norm(tensor(64, 4096), tensor(4096, dtype=torch.float32), 1e-5),
            wide=True,
        ),
        *(
            Case(f"add_rms_norm {width}", partial(add, width), wide=True)
            for width in (1024, 4096, 8192)
        ),
    ]


def _attention_cases() -> list[Case]:
    """At 128 dimensions as most models are, and with all that may add to a score; else the
    latter, which needs more registers."""

    def case(kind: str, model: Model, chips: tuple[str, ...] = ALL_CHIPS) -> Case:
        parts = [f"attention {kind} {model.head_dim}"]
        parts += ["float8"] if model.float8 else []
        parts += ["float32"] if model.dtype == torch.float32 else []
        parts += ["rich"] if model.rich else []
        parts += [f"blocks of {model.block_size}"] if model.block_size != 16 else []
        group = model.num_heads // model.num_kv_heads
        parts += [f"groups of {group}"] if group != 4 else []
        rows = CHUNKS if kind == "chunk" else DECODING
        # Of 256 dimensions a fixed part leaves registers for tiles of 32 queries only.
        wgmma = kind == "chunk" or (kind == "fixed" and model.head_dim < 256)
        wgmma = wgmma and model.dtype != torch.float32
        run = partial(attention, model, rows)
        return Case(" ".join(parts), run, chips, wide=True, wgmma=wgmma)

    float32 = [Model(head_dim=dim, dtype=torch.float32) for dim in (64, 128, 256)]
    return [
        *(case(kind, Model()) for kind in ("chunk", "decode")),
        *(
            case(kind, Model(head_dim=dim, rich=True))
            for kind in ("chunk", "decode")
            for dim in (64, 128, 256)
        ),
        *(case("fixed", Model(head_dim=dim, deterministic=True)) for dim in (64, 128, 256)),
        *(case("chunk", model) for model in float32),
        *(
            case(kind, Model(head_dim=dim, float8=True), FLOAT8_CHIPS)
            for kind in ("chunk", "decode")
            for dim in (128, 256)
        ),
        case("fixed", Model(float8=True, deterministic=True), FLOAT8_CHIPS),
        case("decode", Model(block_size=128), ("sm_90",)),
        case("chunk", Model(num_heads=28, num_kv_heads=4), ("sm_80", "sm_90")),
        Case("attention shared prefix 128", partial(shared_prefix, Model()), wide=True),
        Case(
            "attention shared prefix 256 float8",
            partial(shared_prefix, Model(head_dim=256, float8=True)),
            ("sm_90",),
            wide=True,
        ),
    ]


def _activation_cases() -> list[Case]:
    return [
        Case("silu_and_mul 768", lambda: silu_and_mul(tensor(64, 2 * 768)), wide=True),
        Case("silu_and_mul 14336", lambda: silu_and_mul(tensor(64, 2 * 14336)), wide=True),
        Case("gelu_and_mul 9216", lambda: gelu_and_mul(tensor(64, 2 * 9216), tanh=True), wide=True),
        Case("gelu_and_mul erf", lambda: gelu_and_mul(tensor(64, 2 * 4096), tanh=False), wide=True),
    ]


def _linear_cases() -> list[Case]:
    def multiply(width: int, depth: int, dtype: torch.dtype, bias: bool) -> None:
        weight = tensor(width, depth, dtype=dtype)
        added = tensor(width, dtype=dtype) if bias else None
        invariant_linear(tensor(64, depth, dtype=dtype), weight, added)

    half, single = torch.bfloat16, torch.float32
    return [
        Case("linear", partial(multiply, 6144, 4096, half, False), wide=True, wgmma=True),
        Case("linear bias", partial(multiply, 4608, 3584, half, True), wgmma=True),
        Case("linear odd width", partial(multiply, 50257, 576, half, False), wide=True, wgmma=True),
        Case("linear float32", partial(multiply, 6144, 4096, single, False), wide=True),
    ]


def _expert_cases() -> list[Case]:
    half = ("few", "many", "most", "fixed")
    return [
        *(
            Case(f"experts {name}", partial(products, name), wide=True, wgmma=name != "few")
            for name in half
        ),
        Case("experts float32", partial(products, "float32", torch.float32), wide=True),
        Case("experts chosen 8 of 128", partial(choose, 128, 8)),
        Case("experts chosen 2 of 8 float32", partial(choose, 8, 2, torch.float32)),
        Case("experts added", add, wide=True),
    ]


@dataclass(frozen=True, slots=True)
class _Heads:
    """Llama-3-8B's heads, unless said otherwise."""

    num_q: int = 32
    num_kv: int = 8
    head_dim: int = 128
    half: int = 64
    norms: bool = False
    dtype: torch.dtype = torch.bfloat16  # the cache's

    @property
    def cache(self) -> Tensor:
        return tensor(1000, 16, self.num_kv, self.head_dim, dtype=self.dtype)

    @property
    def scales(self) -> tuple[Tensor, Tensor] | None:
        scale = tensor(self.num_kv, dtype=torch.float32)
        return (scale, scale) if self.dtype == FLOAT8 else None

    def store(self) -> None:
        k = tensor(64, self.num_q + 2 * self.num_kv, self.head_dim)[:, -self.num_kv :]
        store_kv(k, k, self.cache, self.cache, SLOTS, self.scales)

    def store_heads(self) -> None:
        turn = tensor(64, 1, self.head_dim)
        norm = tensor(self.head_dim)
        store_heads(
            tensor(64, self.num_q + 2 * self.num_kv, self.head_dim),
            *(self.cache, self.cache, SLOTS),
            turns=(turn, turn) if self.half else None,
            half=self.half,
            norms=(norm, norm) if self.norms else None,
            eps=1e-6,
            scales=self.scales,
        )


def _heads_cases() -> list[Case]:
    turn = tensor(64, 1, 128)
    return [
        Case("store_kv", _Heads().store),
        Case("store_kv float8", _Heads(dtype=FLOAT8).store, chips=FLOAT8_CHIPS),
        Case("store_heads", _Heads().store_heads),
        Case("store_heads norms", _Heads(norms=True).store_heads),
        Case("store_heads norms, no turns", _Heads(norms=True, half=0).store_heads),
        Case("store_heads 80", _Heads(head_dim=80, half=40).store_heads),
        Case("store_heads 96, partly rotary", _Heads(head_dim=96, half=36).store_heads),
        Case("store_heads 256", _Heads(8, 4, 256, 128, norms=True).store_heads),
        Case(
            "store_heads float8", _Heads(norms=True, dtype=FLOAT8).store_heads, chips=FLOAT8_CHIPS
        ),
        Case("rope", lambda: rope(tensor(64, 48, 128)[:, :40], turn, turn, 64)),
    ]


def _block_cases() -> list[Case]:
    pool, ids = tensor(32, 2, 1000, 16, 8, 128), tensor(9, dtype=torch.int64)
    staging = tensor(32, 2, 9, 16, 8, 128)
    return [
        Case("copy_blocks", lambda: copy_blocks(pool, 2, ids, ids)),
        Case("gather_blocks", lambda: gather_blocks(pool, 2, ids)),
        Case("scatter_blocks", lambda: scatter_blocks(pool, 2, ids, staging)),
        Case("copy_blocks float8", lambda: copy_blocks(pool.to(FLOAT8), 2, ids, ids)),
    ]


def _sampling_cases() -> list[Case]:
    def numbers(dtype: torch.dtype) -> Tensor:
        return tensor(16, dtype=dtype)

    def draw(dtype: torch.dtype, vocab: int) -> None:
        shares, wholes = numbers(torch.float32), numbers(torch.int64)
        parameters = SamplingParameters(shares, wholes, shares, shares, wholes, wholes)
        sample(tensor(16, vocab, dtype=dtype), parameters)

    mask = tensor(16, 4008, dtype=torch.int32)
    bias_ids, bias = tensor(16, 300, dtype=torch.int32), tensor(16, 300, dtype=torch.float32)
    counts = tensor(16, 128256, dtype=torch.int32)
    penalties = [numbers(torch.float32)] * 3
    edits = LogitEdits(mask, (bias_ids, bias), counts, mask, *penalties)
    return [
        Case("sample bfloat16", lambda: draw(torch.bfloat16, 128256)),
        Case("sample float32", lambda: draw(torch.float32, 128256)),
        Case("sample odd vocabulary", lambda: draw(torch.bfloat16, 50257)),
        Case("edit_logits", lambda: edit_logits(tensor(16, 128256), edits)),
        Case("edit_logits mask", lambda: edit_logits(tensor(16, 128256), LogitEdits(mask))),
    ]


CASES = [
    *_norm_cases(),
    *_activation_cases(),
    *_linear_cases(),
    *_expert_cases(),
    *_heads_cases(),
    *_block_cases(),
    *_attention_cases(),
    *_sampling_cases(),
]
