"""What a plain decoder is made of, and how the library is told: mirrors plain_decoder.c."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cb_kernels.cpu.kernels import Kernels
from cb_kernels.int8_linear import Int8Linear
from cb_kernels.packed_linear import PackedLinear

_LANES = 16
_INT64, _FLOAT, _POINTER = ctypes.c_int64, ctypes.c_float, ctypes.c_void_p


class LayerFacts(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("attention_norm", "mlp_norm", "q_norm", "k_norm")),
        *((name, _POINTER) for name in ("qkv", "output", "gate_up", "down")),
        *((f"{name}_bias", _POINTER) for name in ("qkv", "output", "gate_up", "down")),
        *((f"{name}_scales", _POINTER) for name in ("qkv", "output", "gate_up", "down")),
        *((name, _INT64) for name in ("turns", "window")),
    )


class ModelFacts(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("embedding", "norm", "head", "head_scales")),
        *((name, _INT64) for name in ("embedding_is_packed", "vocab", "num_layers", "hidden")),
        *((name, _INT64) for name in ("heads", "kv_heads", "dim", "half", "width")),
        *((name, _FLOAT) for name in ("eps", "attention_scale", "soft_cap", "residual_scale")),
        ("embedding_scale", _FLOAT),
    )


class StepFacts(ctypes.Structure):
    _fields_ = (
        *((name, _INT64) for name in ("rows", "tokens", "num_wanted", "table_stride")),
        *((name, _INT64) for name in ("num_blocks", "block_size", "block_stride", "head_stride")),
        *((name, _POINTER) for name in ("table", "starts", "lens")),
        *((name, _POINTER) for name in ("slots", "token_ids", "wanted")),
        *((name, _POINTER) for name in ("k_caches", "v_caches", "cos", "sin")),
        *((name, _POINTER) for name in ("x", "kept", "normed", "qkv", "attended", "gated")),
        *((name, _POINTER) for name in ("rounded", "out", "best")),
    )


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer: norm, QKV, rotation, attention, projection; norm, gated MLP; each sum onto x."""

    attention_norm: Tensor  # [hidden]
    mlp_norm: Tensor
    q_norm: Tensor | None  # [D], of each head
    k_norm: Tensor | None
    qkv: PackedLinear | Int8Linear
    output: PackedLinear | Int8Linear
    gate_up: PackedLinear | Int8Linear  # gated
    down: PackedLinear | Int8Linear
    turns: int | None  # which cos and sin of a step turn it; None: none
    window: int | None  # latest keys that a query sees; None: all


@dataclass(frozen=True, slots=True)
class DecoderEnds:
    """What stands before the layers and behind them."""

    embedding: Tensor | PackedLinear  # [vocab, hidden], or a head that is tied to it
    embedding_scale: float
    norm: Tensor  # [hidden]
    head: PackedLinear | Int8Linear | None  # None: it is somebody else's


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """What all layers have in common."""

    heads: int
    kv_heads: int
    dim: int
    half: int  # of the rotary part
    eps: float
    attention_scale: float
    soft_cap: float | None
    residual_scale: float


def layer_facts(weights: LayerWeights) -> LayerFacts:
    norms = (weights.attention_norm, weights.mlp_norm, weights.q_norm, weights.k_norm)
    linears = (weights.qkv, weights.output, weights.gate_up, weights.down)
    tensors = (
        *norms,
        *(one.packed for one in linears),
        *(one.bias for one in linears),
        *(one.scales if isinstance(one, Int8Linear) else None for one in linears),
    )
    return LayerFacts(
        *(None if tensor is None else tensor.data_ptr() for tensor in tensors),
        -1 if weights.turns is None else weights.turns,
        weights.window or 0,
    )


def model_facts(
    layers: Sequence[LayerWeights], ends: DecoderEnds, shape: DecoderShape
) -> ModelFacts:
    embedding, head = ends.embedding, ends.head
    is_packed = isinstance(embedding, PackedLinear)
    vocab = embedding.width if isinstance(embedding, PackedLinear) else embedding.shape[0]
    head_packed = None if head is None else head.packed
    scale = torch.tensor(ends.embedding_scale, dtype=torch.bfloat16)  # as the decoder rounds it
    return ModelFacts(
        (embedding.packed if isinstance(embedding, PackedLinear) else embedding).data_ptr(),
        ends.norm.data_ptr(),
        None if head_packed is None else head_packed.data_ptr(),
        head.scales.data_ptr() if isinstance(head, Int8Linear) else None,
        *(is_packed, vocab, len(layers), ends.norm.shape[0]),
        *(shape.heads, shape.kv_heads, shape.dim, shape.half, layers[0].down.depth),
        *(shape.eps, shape.attention_scale, shape.soft_cap or 0.0, shape.residual_scale),
        float(scale),
    )


def obstacle(
    c: Kernels | None, layers: Sequence[LayerWeights], ends: DecoderEnds, shape: DecoderShape
) -> str:
    """Why the library does not take these; empty when it does."""
    if c is None or not c.has_decoder:
        return "the library has no such call, or not one that works"
    hidden = layers[0].attention_norm.shape[0]
    return _obstacle_in_layers(c, layers, shape) or _obstacle_at_ends(ends, hidden)


def _obstacle_at_ends(ends: DecoderEnds, hidden: int) -> str:
    embedding, head = ends.embedding, ends.head
    if isinstance(embedding, PackedLinear):
        vocab, depth, fits = embedding.width, embedding.depth, not embedding.gated
    else:
        (vocab, depth), fits = embedding.shape, embedding.is_contiguous()
    if not fits or embedding.dtype != torch.bfloat16 or depth != hidden:
        return f"its embedding is {embedding.dtype} {[vocab, depth]}"
    if head is not None:
        if (head.width, head.depth, head.gated) != (vocab, depth, False) or head.bias is not None:
            return f"its head is no plain {[vocab, depth]}"
        if head.packed is None:
            return "torch multiplies its head"
    if ends.norm.dtype != torch.bfloat16 or ends.norm.shape != (hidden,):
        return f"its last norm is {ends.norm.dtype} {list(ends.norm.shape)}"
    return ""


def _obstacle_in_layers(c: Kernels, layers: Sequence[LayerWeights], shape: DecoderShape) -> str:
    group = shape.heads // shape.kv_heads
    if shape.heads % shape.kv_heads:
        return f"{shape.heads} query heads cannot share {shape.kv_heads} KV heads evenly"
    if not c.takes_paired(torch.bfloat16, _LANES, shape.dim, group):
        return "there are no kernels for their heads"
    if 2 * shape.half > shape.dim:
        return f"the rotary part of {2 * shape.half} is wider than a head"
    if shape.half % _LANES and any(layer.turns is not None for layer in layers):
        return f"half of the rotary part is {shape.half}, no multiple of {_LANES}"
    hidden, width = layers[0].attention_norm.shape[0], layers[0].down.depth
    q_width, kv_width = shape.heads * shape.dim, shape.kv_heads * shape.dim
    wanted = [
        (q_width + 2 * kv_width, hidden, False),
        (hidden, q_width, False),
        (2 * width, hidden, True),
        (hidden, width, False),
    ]
    for layer in layers:
        linears = (layer.qkv, layer.output, layer.gate_up, layer.down)
        if [(one.width, one.depth, one.gated) for one in linears] != wanted:
            return f"their weights are not {wanted}"
        if any(one.packed is None for one in linears):
            return "torch multiplies some of their weights"
        norms = [(layer.attention_norm, hidden), (layer.mlp_norm, hidden)]
        norms += [(norm, shape.dim) for norm in (layer.q_norm, layer.k_norm) if norm is not None]
        for norm, size in norms:
            if norm.dtype != torch.bfloat16 or norm.shape != (size,) or size % _LANES:
                return f"a norm is {norm.dtype} {list(norm.shape)}"
    return ""
