"""A plain bfloat16 decoder as one call into the library: see plain_decoder.c.

Between two products of a small step Python would take longer than the product. The library's
workers begin a step while its caller goes on, and the caller joins them later.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import torch
from torch import Tensor

from cb_kernels.cpu.kernels import Kernels, raise_for
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


class PairedCaches:
    """K and V of each layer, all of one shape and order, and where they lie."""

    def __init__(self, layers: Sequence[tuple[Tensor, Tensor]]) -> None:
        """`layers`: see `paired_views`. Raises ValueError for others."""
        k_first, v_first = self._first = layers[0]
        check_paired(k_first, v_first)
        for pair in layers:
            for cache, first in zip(pair, self._first, strict=True):
                if (cache.shape, cache.stride()) != (first.shape, first.stride()):
                    raise ValueError(f"not all caches are like {_text(first)}: {_text(cache)}")
                if cache.dtype != torch.bfloat16:
                    raise ValueError(f"the caches must be bfloat16: {_text(cache)}")
        k_caches, v_caches = zip(*layers, strict=True)
        self.addresses = _addresses(k_caches), _addresses(v_caches)
        self.num_layers = len(layers)
        self.shape = tuple(k_first.shape)  # [N, block_size, H_kv, D / 2, 2]
        self.block_stride, self.head_stride = k_first.stride(0), k_first.stride(2)


class TurnTables:
    """cos and sin of the first positions, of each kind that a model's layers turn by."""

    def __init__(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """`pairs`: bfloat16 [positions, D] each. Raises ValueError for others."""
        self.pairs = tuple(pairs)  # the library has their addresses
        tables = [table for pair in pairs for table in pair]
        self.dims = {table.shape[-1] for table in tables}
        self.num_positions = min((len(table) for table in tables), default=0)
        for table in tables:
            if (table.dim(), table.dtype, table.is_contiguous()) != (2, torch.bfloat16, True):
                raise ValueError(f"cos and sin must be bfloat16 [positions, D]: {_text(table)}")
        self.addresses = tuple(_addresses([pair[i] for pair in pairs]) for i in range(2))


@dataclass(frozen=True, slots=True)
class PagedStep:
    """A step's rows and where their K and V go.

    No row of one token may write to a block that another row of the step reads: each is written and
    read in an order of its own.
    """

    caches: PairedCaches
    batch: RaggedBatch
    slot_mapping: Tensor  # [T] int64


class DecoderRun:
    """A step of a `PlainDecoder`. It is over with its result, or with this object; before that
    nothing that it was given may change, but for the token ids until it begins. One thread's."""

    def __init__(
        self,
        library: ctypes.CDLL,
        arguments: tuple[object, ...],
        out: Tensor,
        used: tuple[object, ...],
    ) -> None:
        """`used` are those whose addresses the library has."""
        self._library = library
        self._arguments = arguments
        self._out = out
        self._used = used
        self._run = ctypes.c_void_p()  # of the library, while it is under way
        self._is_over = False

    def begin(self) -> None:
        """The workers compute it from now on. Once. Raises IndexError for what is not there."""
        status = self._library.cb_begin_decoder(*self._arguments, ctypes.byref(self._run))
        raise_for(status, "a token id, a wanted token, or a row's block or slot is not there")

    def help(self) -> None:
        """Take part in it until only the head's product is left."""
        if self._run:
            self._library.cb_help_decoder(self._run)

    def result(self) -> Tensor:
        """Take part in it to its end. Raises as `begin`, if it was not begun, and RuntimeError in
        another process than began it."""
        if not self._is_over and not self._run:
            self.begin()
        if not self._end():
            raise RuntimeError("a fork of this process began the step, and has its workers")
        return self._out

    def __del__(self) -> None:
        self._end()

    def _end(self) -> bool:
        """Whether it came to its end."""
        run, self._run, self._is_over = self._run, ctypes.c_void_p(), True
        return not run or self._library.cb_end_decoder(run) == 0


class PlainDecoder:
    """Computes steps of a decoder, given token ids [T] int64, the cos and sin that the layers name
    by number, the step, and which of the T tokens are wanted: [R] int64, R at most T."""

    def __init__(
        self,
        layers: Sequence[LayerWeights],
        ends: DecoderEnds,
        shape: DecoderShape,
        library: Kernels | None = None,
    ) -> None:
        """`library`: None: the one that is loaded. Raises ValueError for what it does not take."""
        c = kernels() if library is None else library
        reason = obstacle(c, layers, ends, shape)
        if reason:
            raise ValueError(f"this decoder cannot be run in one call: {reason}")
        assert c is not None
        self._c = c
        self._weights = tuple(layers)  # the library has their addresses
        self._ends = ends
        self._shape = shape
        self._layers = (LayerFacts * len(layers))(*(layer_facts(weights) for weights in layers))
        self._hidden = layers[0].attention_norm.shape[0]
        self._num_turns = 1 + max(-1 if one.turns is None else one.turns for one in layers)
        self._model = model_facts(layers, ends, shape)
        linears = [(one.qkv, one.output, one.gate_up, one.down) for one in layers]
        self._rounds = any(isinstance(one, Int8Linear) for one in (*chain(*linears), ends.head))
        self._room_widths = (
            *(self._hidden, self._hidden, self._hidden),
            (shape.heads + 2 * shape.kv_heads) * shape.dim,
            shape.heads * shape.dim,
            layers[0].down.depth,
        )

    @property
    def has_head(self) -> bool:
        return self._ends.head is not None

    def prepare(
        self,
        token_ids: Tensor,
        turns: TurnTables,
        step: PagedStep,
        wanted: Tensor,
        ids: Tensor | None = None,
    ) -> DecoderRun:
        """Its result: the wanted tokens' logits [R, vocab], or without a head their norms
        [R, hidden]. Or `ids` [R] int64, if they are given: those of the largest logits, the first
        of equals, -1 where that is no finite number; the logits are not written then.

        Raises ValueError for arguments that the library would read as something else, and
        IndexError for what is not there."""
        self._check(token_ids, turns, step, wanted)
        if ids is None:
            width = self._model.vocab if self.has_head else self._hidden
            out = torch.empty(len(wanted), width, dtype=torch.bfloat16)
        else:
            self._check_ids(ids, wanted)
            out = ids
        table, starts, lens = step.batch.host_rows()
        caches = step.caches
        num_tokens = len(token_ids)
        room = torch.empty(num_tokens * sum(self._room_widths), dtype=torch.bfloat16)
        rooms = accumulate(
            (2 * num_tokens * width for width in self._room_widths[:-1]),
            initial=room.data_ptr(),
        )
        rounded = None
        if self._rounds:
            assert self._c.int8 is not None
            rounded = self._c.int8.room(num_tokens, max(self._room_widths))
        address = out.data_ptr()
        facts = StepFacts(
            *(len(lens), num_tokens, len(wanted), table.stride(0), *caches.shape[:2]),
            *(caches.block_stride, caches.head_stride),
            *(table.data_ptr(), starts.data_ptr(), lens.data_ptr()),
            *(step.slot_mapping.data_ptr(), token_ids.data_ptr(), wanted.data_ptr()),
            *map(ctypes.addressof, (*caches.addresses, *turns.addresses)),
            *rooms,
            None if rounded is None else rounded.data_ptr(),
            *((address, None) if ids is None else (None, address)),
        )
        used = (self, facts, token_ids, turns, step, wanted, table, starts, lens, room, rounded)
        arguments = (ctypes.byref(self._model), self._layers, ctypes.byref(facts))
        return DecoderRun(self._c.library, arguments, out, used)

    def _check_ids(self, ids: Tensor, wanted: Tensor) -> None:
        if not self.has_head:
            raise ValueError("there are no logits without a head")
        if ids.dtype != torch.int64 or ids.shape != wanted.shape or not ids.is_contiguous():
            raise ValueError(f"ids must be int64 {list(wanted.shape)}, got {_text(ids)}")

    def _check(self, token_ids: Tensor, turns: TurnTables, step: PagedStep, wanted: Tensor) -> None:
        num_tokens = step.batch.num_tokens
        for name, tensor, count in (
            ("token ids", token_ids, num_tokens),
            ("slots", step.slot_mapping, num_tokens),
            ("wanted tokens", wanted, min(len(wanted), num_tokens)),
        ):
            is_int64 = tensor.dtype == torch.int64 and tensor.is_contiguous()
            if tensor.shape != (count,) or not is_int64:
                raise ValueError(f"{name} must be int64 [{count}], got {_text(tensor)}")
        if len(turns.pairs) < self._num_turns:
            raise ValueError(f"the layers name {self._num_turns} turns, got {len(turns.pairs)}")
        num_positions = max(step.batch.seq_lens, default=0)
        if turns.pairs and (turns.num_positions < num_positions or turns.dims != {self._shape.dim}):
            raise ValueError(
                f"cos and sin must be [{num_positions} or more, {self._shape.dim}], got"
                f" [{turns.num_positions}, {sorted(turns.dims)}]"
            )
        if step.caches.num_layers != len(self._weights):
            raise ValueError(f"{len(self._weights)} layers, {step.caches.num_layers} caches")
        wanted_shape = (step.batch.block_size, self._shape.kv_heads, self._shape.dim // 2, 2)
        if step.caches.shape[1:] != wanted_shape:
            raise ValueError(f"the caches must be [N, *{wanted_shape}]: {step.caches.shape}")


def _text(tensor: Tensor) -> str:
    return f"{shape_text(tensor)} of strides {tensor.stride()}"


def _addresses(tensors: Sequence[Tensor]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))
