"""A plain bfloat16 decoder as one call into the library: see plain_decoder.c.

Between two products of a small step Python would take longer than the product.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from cb_kernels.cpu.kernels import raise_for
from cb_kernels.cpu.library import kernels
from cb_kernels.cpu.plain_decoder_facts import (
    DecoderEnds,
    DecoderShape,
    LayerFacts,
    LayerWeights,
    StepFacts,
    layer_facts,
    model_facts,
    obstacle,
)
from cb_kernels.int8_linear import Int8Linear
from cb_kernels.paired import check_paired
from cb_kernels.ragged import RaggedBatch
from cb_kernels.shapes import shape_text


@dataclass(frozen=True, slots=True)
class PagedStep:
    """A step's rows and where their K and V go."""

    caches: Sequence[tuple[Tensor, Tensor]]  # paired, of each layer, all of the same strides
    batch: RaggedBatch
    slot_mapping: Tensor  # [T] int64


class PlainDecoder:
    """Call it with token ids [T] int64, the cos and sin [positions, D] that the layers name by
    number, the step, and which of the T tokens are wanted: [R] int64, R at most T.

    It returns the wanted tokens' logits [R, vocab], or without a head their norms [R, hidden].
    """

    def __init__(
        self, layers: Sequence[LayerWeights], ends: DecoderEnds, shape: DecoderShape
    ) -> None:
        """Raises ValueError for what the library does not take."""
        reason = obstacle(layers, ends, shape)
        if reason:
            raise ValueError(f"this decoder cannot be run in one call: {reason}")
        self._weights = tuple(layers)  # the library has their addresses
        self._ends = ends
        self._shape = shape
        self._layers = (LayerFacts * len(layers))(*(layer_facts(weights) for weights in layers))
        self._hidden = layers[0].attention_norm.shape[0]
        self._num_turns = 1 + max(-1 if one.turns is None else one.turns for one in layers)
        self._model = model_facts(layers, ends, shape)
        linears = (*(one.qkv for one in layers), ends.head)
        self._rounds = any(isinstance(linear, Int8Linear) for linear in linears)
        self._room_widths = (
            *(self._hidden, self._hidden, self._hidden),
            (shape.heads + 2 * shape.kv_heads) * shape.dim,
            shape.heads * shape.dim,
            layers[0].down.depth,
        )
        # The caches that were checked last, and the addresses of K and of V.
        self._caches: Sequence[tuple[Tensor, Tensor]] = ()
        self._addresses = _addresses([]), _addresses([])

    @property
    def has_head(self) -> bool:
        return self._ends.head is not None

    def __call__(
        self,
        token_ids: Tensor,
        turns: Sequence[tuple[Tensor, Tensor]],
        step: PagedStep,
        wanted: Tensor,
    ) -> Tensor:
        """Raises ValueError for arguments that the library would read as something else, and
        IndexError for what is not there."""
        self._check(token_ids, turns, step, wanted)
        table, starts, lens = step.batch.host_rows()
        k_cache, _ = step.caches[0]
        num_tokens, num_wanted = len(token_ids), len(wanted)
        room = torch.empty(num_tokens * sum(self._room_widths), dtype=torch.bfloat16)
        ends = accumulate((2 * num_tokens * width for width in self._room_widths), initial=0)
        out = torch.empty(
            num_wanted, self._model.vocab if self.has_head else self._hidden, dtype=room.dtype
        )
        c = kernels()
        assert c is not None
        rounded = None
        if self._rounds:
            assert c.int8 is not None
            rounded = c.int8.room(num_tokens, max(self._room_widths))
        cos, sin = (_addresses([pair[i] for pair in turns]) for i in range(2))
        facts = StepFacts(
            *(lens.shape[0], num_tokens, num_wanted, table.stride(0), *k_cache.shape[:2]),
            *(k_cache.stride(0), k_cache.stride(2)),
            *(each.data_ptr() for each in (table, starts, lens)),
            *(each.data_ptr() for each in (step.slot_mapping, token_ids, wanted)),
            *(ctypes.addressof(each) for each in (*self._addresses, cos, sin)),
            *(room.data_ptr() + end for end in list(ends)[:-1]),
            *(None if rounded is None else rounded.data_ptr(), out.data_ptr()),
        )
        status = c.library.cb_plain_decoder(
            ctypes.byref(self._model), self._layers, ctypes.byref(facts)
        )
        raise_for(status, "a token id, a wanted token, or a row's block or slot is not there")
        return out

    def _check(
        self,
        token_ids: Tensor,
        turns: Sequence[tuple[Tensor, Tensor]],
        step: PagedStep,
        wanted: Tensor,
    ) -> None:
        num_tokens = step.batch.num_tokens
        for name, tensor, count in (
            ("token ids", token_ids, num_tokens),
            ("slots", step.slot_mapping, num_tokens),
            ("wanted tokens", wanted, min(len(wanted), num_tokens)),
        ):
            is_int64 = tensor.dtype == torch.int64 and tensor.is_contiguous()
            if tensor.shape != (count,) or not is_int64:
                raise ValueError(f"{name} must be int64 [{count}], got {_text(tensor)}")
        if len(turns) < self._num_turns:
            raise ValueError(f"the layers name {self._num_turns} turns, got {len(turns)}")
        num_positions = max(step.batch.seq_lens, default=0)
        for turn in (tensor for pair in turns for tensor in pair):
            if (
                (turn.dim(), turn.dtype, turn.is_contiguous()) != (2, torch.bfloat16, True)
                or turn.shape[0] < num_positions
                or turn.shape[1] != self._shape.dim
            ):
                raise ValueError(
                    f"cos and sin must be bfloat16 [{num_positions} or more, {self._shape.dim}]:"
                    f" {_text(turn)}"
                )
        if step.caches is not self._caches:
            self._check_caches(step)
            self._caches = step.caches
            k_caches, v_caches = zip(*step.caches, strict=True)
            self._addresses = _addresses(k_caches), _addresses(v_caches)

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
    return (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))
