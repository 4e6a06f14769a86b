"""What is asked of the decoder's call before it is trusted: to agree with the single operations,
which agree with torch."""

from __future__ import annotations

import torch
from torch import Tensor

from cb_kernels.cpu.kernels import Kernels
from cb_kernels.cpu.plain_decoder import PagedStep, PairedCaches, PlainDecoder, TurnTables
from cb_kernels.cpu.plain_decoder_facts import DecoderEnds, DecoderShape, LayerWeights
from cb_kernels.cpu.self_test import ALLOWED, difference_of
from cb_kernels.int8_linear import Int8Linear
from cb_kernels.packed_linear import PackedLinear
from cb_kernels.paired import paired_views
from cb_kernels.ragged import RaggedBatch

_HIDDEN, _WIDTH, _VOCAB, _BLOCK_SIZE = 64, 96, 208, 16
_WINDOWS = (None, 9)  # of each layer
_SHAPE = DecoderShape(
    heads=4,
    kv_heads=2,
    dim=32,
    half=16,
    eps=1e-5,
    attention_scale=0.2,
    soft_cap=None,
    residual_scale=0.5,
)


class _Step:
    """A decoding row, and a chunk that begins in one block and ends in the next."""

    def __init__(self) -> None:
        self.batch = RaggedBatch(
            block_table=torch.tensor([[3, 1], [0, 2]]),
            query_start_loc=[0, 1, 6],
            seq_lens=[21, 18],
            block_size=_BLOCK_SIZE,
        )
        self.positions = torch.tensor([20, 13, 14, 15, 16, 17])
        self.slots = torch.tensor([20, 13, 14, 15, 32, 33])
        self.token_ids = torch.tensor([7, 200, 31, 0, 95, 31])
        self.wanted = torch.tensor([0, 5])
        self.turns = _numbers(2, 32, _SHAPE.dim)


def fault_of_decoder(kernels: Kernels) -> str | None:
    """What of the call is off, or None."""
    layers = [_layer(kernels, index) for index in range(len(_WINDOWS))]
    head = _linear(kernels, 0, _VOCAB, _HIDDEN)
    ends = DecoderEnds(_numbers(_VOCAB, _HIDDEN), 1.0, _numbers(_HIDDEN), head)
    decoder = PlainDecoder(layers, ends, _SHAPE, kernels)
    step = _Step()
    logits = _in_one_call(decoder, step, None)
    difference = difference_of(logits, _one_by_one(kernels, layers, ends, step))
    if not difference <= ALLOWED[torch.bfloat16]:  # NaN is a fault too
        return f"logits are off by {difference:.2g}"
    ids = _in_one_call(decoder, step, torch.empty_like(step.wanted)).tolist()
    largest = logits.float().argmax(-1).tolist()
    return None if ids == largest else f"the largest logits are those of {largest}, not of {ids}"


def _in_one_call(decoder: PlainDecoder, step: _Step, ids: Tensor | None) -> Tensor:
    caches = _caches()
    paged = PagedStep(PairedCaches(caches), step.batch, step.slots)
    turns = TurnTables([(step.turns[0], step.turns[1])])
    run = decoder.prepare(step.token_ids, turns, paged, step.wanted, ids)
    run.begin()
    run.help()
    return run.result()


def _one_by_one(
    kernels: Kernels, layers: list[LayerWeights], ends: DecoderEnds, step: _Step
) -> Tensor:
    """The wanted tokens' logits."""

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return kernels.rms_norm(x, weight, _SHAPE.eps)

    def linear(weight: PackedLinear | Int8Linear | None, x: Tensor, onto: Tensor | None) -> Tensor:
        assert isinstance(weight, PackedLinear)
        scale = 1.0 if onto is None else _SHAPE.residual_scale
        return kernels.linear(
            *(x, weight.packed, None, weight.width), gated=weight.gated, onto=onto, scale=scale
        )

    assert isinstance(ends.embedding, Tensor)
    x = ends.embedding[step.token_ids]
    cos, sin = step.turns[:, step.positions, None]
    for layer, (k_cache, v_cache) in zip(layers, _caches(), strict=True):
        heads = linear(layer.qkv, norm(x, layer.attention_norm), None)
        parts = [_SHAPE.heads, _SHAPE.kv_heads, _SHAPE.kv_heads]
        q, k, v = heads.view(len(x), -1, _SHAPE.dim).split(parts, 1)
        q, k = kernels.rope(q, cos, sin, _SHAPE.half), kernels.rope(k, cos, sin, _SHAPE.half)
        kernels.store_kv_paired(k, v, k_cache, v_cache, step.slots)
        attended = kernels.attention(
            *(q, k_cache, v_cache, step.batch),
            scale=_SHAPE.attention_scale,
            sliding_window=layer.window,
            soft_cap=None,
            sinks=None,
        )
        x = linear(layer.output, attended.flatten(1), x)
        x = linear(layer.down, linear(layer.gate_up, norm(x, layer.mlp_norm), None), x)
    return linear(ends.head, norm(x[step.wanted], ends.norm), None)


def _layer(kernels: Kernels, index: int) -> LayerWeights:
    q_width = _SHAPE.heads * _SHAPE.dim
    return LayerWeights(
        attention_norm=_numbers(_HIDDEN),
        mlp_norm=_numbers(_HIDDEN).flip(0),
        q_norm=None,
        k_norm=None,
        qkv=_linear(kernels, index, q_width + 2 * _SHAPE.kv_heads * _SHAPE.dim, _HIDDEN),
        output=_linear(kernels, index, _HIDDEN, q_width),
        gate_up=_linear(kernels, index, 2 * _WIDTH, _HIDDEN, gated=True),
        down=_linear(kernels, index, _HIDDEN, _WIDTH),
        turns=0,
        window=_WINDOWS[index],
    )


def _linear(
    kernels: Kernels, index: int, width: int, depth: int, *, gated: bool = False
) -> PackedLinear:
    """Another one for each index."""
    weight = _numbers(width, depth).roll(index, 0) / 4
    return PackedLinear(kernels.pack(weight, gated=gated), None, weight.shape, gated=gated)


def _caches() -> list[tuple[Tensor, Tensor]]:
    shape = (len(_WINDOWS), 2, _SHAPE.kv_heads, 4, _BLOCK_SIZE * _SHAPE.dim)
    return [paired_views(k, v, _BLOCK_SIZE) for k, v in _numbers(*shape)]


def _numbers(*shape: int) -> Tensor:
    """Between -1 and 1; in weights, those of `numbers` would cancel one another."""
    squares = torch.arange(1, torch.Size(shape).numel() + 1, dtype=torch.float64) ** 2
    return torch.sin(squares * 1.7).view(shape).to(torch.bfloat16)
