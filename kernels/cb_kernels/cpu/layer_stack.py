"""All layers of a plain bfloat16 decoder as one call into the library: see layers.c.

Between two products of a small step Python would take longer than the product.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cb_kernels.cpu.kernels import raise_for
from cb_kernels.cpu.library import kernels
from cb_kernels.int8_linear import Int8Linear
from cb_kernels.packed_linear import PackedLinear
from cb_kernels.paired import check_paired
from cb_kernels.ragged import RaggedBatch
from cb_kernels.shapes import shape_text

_LANES = 16
_INT64, _FLOAT, _POINTER = ctypes.c_int64, ctypes.c_float, ctypes.c_void_p


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("attention_norm", "mlp_norm", "q_norm", "k_norm")),
        *((name, _POINTER) for name in ("qkv", "output", "gate_up", "down")),
        *((f"{name}_bias", _POINTER) for name in ("qkv", "output", "gate_up", "down")),
        *((f"{name}_scales", _POINTER) for name in ("qkv", "output", "gate_up", "down")),
        *((name, _INT64) for name in ("turns", "window")),
    )


class _Shape(ctypes.Structure):
    _fields_ = (
        *((name, _INT64) for name in ("num_layers", "hidden", "heads", "kv_heads", "dim", "half")),
        ("width", _INT64),
        *((name, _FLOAT) for name in ("eps", "attention_scale", "soft_cap", "residual_scale")),
    )


class _Step(ctypes.Structure):
    _fields_ = (
        *((name, _INT64) for name in ("rows", "tokens", "table_stride", "num_blocks")),
        *((name, _INT64) for name in ("block_size", "block_stride", "head_stride")),
        *((name, _POINTER) for name in ("table", "starts", "lens", "slots")),
        *((name, _POINTER) for name in ("k_caches", "v_caches", "cos", "sin")),
        *((name, _POINTER) for name in ("x", "normed", "qkv", "attended", "gated")),
        ("rounded", _POINTER),
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
class StackShape:
    """What all layers have in common."""

    heads: int
    kv_heads: int
    dim: int
    half: int  # of the rotary part
    eps: float
    attention_scale: float
    soft_cap: float | None
    residual_scale: float


@dataclass(frozen=True, slots=True)
class PagedStep:
    """A step's rows and where their K and V go."""

    caches: Sequence[tuple[Tensor, Tensor]]  # paired, of each layer, all of the same strides
    batch: RaggedBatch
    slot_mapping: Tensor  # [T]


class LayerStack:
    """Call it with x [T, hidden], the cos and sin [T, 1, D] that the layers name by number, and
    the step; it returns x after the last layer."""

    def __init__(self, layers: Sequence[LayerWeights], shape: StackShape) -> None:
        """Raises ValueError for what the library does not take."""
        reason = _obstacle(layers, shape)
        if reason:
            raise ValueError(f"these layers cannot be run in one call: {reason}")
        self._weights = tuple(layers)  # the library has their addresses
        self._layers = (_Layer * len(layers))(*(_layer(weights) for weights in layers))
        self._hidden = layers[0].attention_norm.shape[0]
        self._width = layers[0].down.depth
        self._num_turns = 1 + max(-1 if one.turns is None else one.turns for one in layers)
        self._shape, self._facts = (
            shape,
            _Shape(
                len(layers),
                self._hidden,
                shape.heads,
                shape.kv_heads,
                shape.dim,
                shape.half,
                self._width,
                shape.eps,
                shape.attention_scale,
                shape.soft_cap or 0.0,
                shape.residual_scale,
            ),
        )

    def __call__(
        self, x: Tensor, turns: Sequence[tuple[Tensor, Tensor]], step: PagedStep
    ) -> Tensor:
        """Raises ValueError for arguments that the library would read as something else."""
        self._check(x, turns, step)
        shape, num_tokens = self._shape, x.shape[0]
        table, starts, lens = step.batch.host_rows()
        slots = step.slot_mapping.long().contiguous()
        k_cache, _ = step.caches[0]
        widths = (
            self._hidden,
            self._hidden,
            (shape.heads + 2 * shape.kv_heads) * shape.dim,
            shape.heads * shape.dim,
            self._width,
        )
        room = [x.new_empty(num_tokens, width) for width in widths]
        room[0].copy_(x)
        c = kernels()
        assert c is not None
        rounded = c.int8.room(num_tokens, max(widths)) if c.int8 else room[0]
        k_caches, v_caches = (_addresses(caches) for caches in zip(*step.caches, strict=True))
        cos, sin = (_addresses([pair[i] for pair in turns]) for i in range(2))
        facts = _Step(
            *(lens.shape[0], num_tokens, table.stride(0), *k_cache.shape[:2]),
            *(k_cache.stride(0), k_cache.stride(2)),
            *(each.data_ptr() for each in (table, starts, lens, slots)),
            *(ctypes.addressof(each) for each in (k_caches, v_caches, cos, sin)),
            *(each.data_ptr() for each in (*room, rounded)),
        )
        status = c.library.cb_layers(ctypes.byref(self._facts), self._layers, ctypes.byref(facts))
        raise_for(status, "a row's block table, or a slot, names a block that is not there")
        return room[0]

    def _check(self, x: Tensor, turns: Sequence[tuple[Tensor, Tensor]], step: PagedStep) -> None:
        num_tokens = step.batch.num_tokens
        if x.dtype != torch.bfloat16 or x.shape != (num_tokens, self._hidden):
            raise ValueError(f"x must be bfloat16 [{num_tokens}, {self._hidden}], got {_text(x)}")
        if step.slot_mapping.shape != (num_tokens,):
            raise ValueError(f"{num_tokens} tokens need as many slots: {_text(step.slot_mapping)}")
        if len(turns) < self._num_turns:
            raise ValueError(f"the layers name {self._num_turns} turns, got {len(turns)}")
        for turn in (tensor for pair in turns for tensor in pair):
            wanted = (num_tokens, 1, self._shape.dim)
            if turn.shape != wanted or turn.dtype != x.dtype or not turn.is_contiguous():
                raise ValueError(f"cos and sin must be bfloat16 {list(wanted)}: {_text(turn)}")
        self._check_caches(step)

    def _check_caches(self, step: PagedStep) -> None:
        if len(step.caches) != len(self._weights):
            raise ValueError(f"{len(self._weights)} layers, {len(step.caches)} caches")
        k_first, v_first = step.caches[0]
        check_paired(k_first, v_first)
        wanted_cache = (step.batch.block_size, self._shape.kv_heads, self._shape.dim // 2)
        if tuple(k_first.shape[1:4]) != wanted_cache:
            raise ValueError(f"the caches must be [N, *{wanted_cache}, 2]: {_text(k_first)}")
        for pair in step.caches:
            for cache, first in zip(pair, step.caches[0], strict=True):
                if (cache.shape, cache.stride()) != (first.shape, first.stride()):
                    raise ValueError(f"not all caches are like {_text(first)}: {_text(cache)}")
                if cache.dtype != torch.bfloat16:
                    raise ValueError(f"the caches must be bfloat16: {_text(cache)}")


def _text(tensor: Tensor) -> str:
    return f"{shape_text(tensor)} of strides {tensor.stride()}"


def _addresses(tensors: Sequence[Tensor]) -> ctypes.Array[ctypes.c_void_p]:
    return (_POINTER * len(tensors))(*(tensor.data_ptr() for tensor in tensors))


def _layer(weights: LayerWeights) -> _Layer:
    norms = (weights.attention_norm, weights.mlp_norm, weights.q_norm, weights.k_norm)
    linears = (weights.qkv, weights.output, weights.gate_up, weights.down)
    tensors = (
        *norms,
        *(one.packed for one in linears),
        *(one.bias for one in linears),
        *(one.scales if isinstance(one, Int8Linear) else None for one in linears),
    )
    return _Layer(
        *(None if tensor is None else tensor.data_ptr() for tensor in tensors),
        -1 if weights.turns is None else weights.turns,
        weights.window or 0,
    )


def _obstacle(layers: Sequence[LayerWeights], shape: StackShape) -> str:
    """Why the library does not take these; empty when it does."""
    c = kernels()
    group = shape.heads // shape.kv_heads
    if shape.heads % shape.kv_heads:
        return f"{shape.heads} query heads cannot share {shape.kv_heads} KV heads evenly"
    if c is None or not c.takes_paired(torch.bfloat16, _LANES, shape.dim, group):
        return "there are no kernels for their heads"
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
