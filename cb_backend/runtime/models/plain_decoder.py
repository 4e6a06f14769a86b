"""Finds out whether a decoder can run in one call, and prepares that call.

Plain layers on a CPU with bfloat16 products: pre-norms, a gated SiLU MLP, packed weights. All
others go through the modules of `decoder`, operation by operation. Engine thread.
"""

from __future__ import annotations

from collections.abc import Sequence

from cb_kernels import (
    DecoderEnds,
    DecoderShape,
    Int8Linear,
    LayerWeights,
    PackedLinear,
    PlainDecoder,
)
from torch import Tensor

from cb_backend.runtime.models.decoder import DecoderLayer
from cb_backend.runtime.models.embedding import Embedding
from cb_backend.runtime.models.linear import Linear
from cb_backend.runtime.models.mlp import GatedMLP
from cb_backend.runtime.models.norms import RMSNorm
from cb_backend.runtime.models.rope import Rope
from cb_backend.runtime.models.spec import DecoderSpec


class _NotPlainError(Exception):
    """It has something that the one call has not."""


def plain_decoder(
    spec: DecoderSpec,
    embedding: Embedding,
    layers: Sequence[DecoderLayer],
    norm: RMSNorm,
    lm_head: Linear,
    ropes: dict[str, Rope],
) -> PlainDecoder | None:
    """None when its operations have to be run one by one. `ropes` in the order of a step's
    turns."""
    halves = {rope.half for rope in ropes.values()}
    if spec.post_norms or not spec.pre_norms or spec.width_norms or len(halves) > 1:
        return None
    shape = DecoderShape(
        heads=spec.num_heads,
        kv_heads=spec.num_kv_heads,
        dim=spec.head_dim,
        half=halves.pop() if halves else 0,
        eps=spec.norm_eps,
        attention_scale=spec.attention_scale,
        soft_cap=spec.attention_soft_cap,
        residual_scale=spec.residual_scale,
    )
    kinds = list(ropes)
    try:
        weights = [_weights(layer, kinds) for layer in layers]
        ends = DecoderEnds(
            embedding=embedding.weight,
            embedding_scale=spec.embedding_scale,
            norm=_norm(norm),
            head=_head(lm_head),
        )
        return PlainDecoder(weights, ends, shape)
    except (_NotPlainError, ValueError):
        return None


def _weights(layer: DecoderLayer, kinds: list[str]) -> LayerWeights:
    attention, mlp = layer.attention, layer.mlp
    if not isinstance(mlp, GatedMLP) or mlp.activation is not None:
        raise _NotPlainError
    norms = attention.qk_norm
    rope = attention.layer.rope
    return LayerWeights(
        attention_norm=_norm(layer.attention_in),
        mlp_norm=_norm(layer.mlp_in),
        q_norm=None if norms is None else _norm(norms.q),
        k_norm=None if norms is None else _norm(norms.k),
        qkv=_kernel(attention.qkv),
        output=_kernel(attention.output),
        gate_up=_kernel(mlp.gate_up),
        down=_kernel(mlp.down),
        turns=None if rope is None else kinds.index(rope),
        window=attention.layer.sliding_window,
    )


def _norm(norm: RMSNorm | None) -> Tensor:
    if norm is None:
        raise _NotPlainError
    return norm.weight


def _kernel(linear: Linear) -> PackedLinear | Int8Linear:
    if linear.kernel is None:
        raise _NotPlainError
    return linear.kernel


def _head(linear: Linear) -> PackedLinear | Int8Linear | None:
    """None for a head that torch multiplies, behind the call."""
    kernel = linear.kernel
    return None if kernel is None or kernel.packed is None else kernel
