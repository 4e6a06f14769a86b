"""The C functions with torch tensors for arguments, and which arguments they take.

Each `takes_...` is the rule of a dispatch: what it refuses goes to torch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from cb_kernels.cpu.int8 import Int8Kernels
from cb_kernels.huge_pages import HugePages
from cb_kernels.ragged import RaggedBatch

_POINTER, _INT64, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
_SIGNATURES: dict[str, Sequence[object]] = {
    "cb_attention": (*[_POINTER] * 8, *[_INT64] * 11, _FLOAT, _FLOAT, *[_INT64] * 2, _INT, _INT),
    "cb_store_kv": (
        *(_POINTER, _INT64, _POINTER, _INT64, _POINTER, _POINTER),
        *([_INT64] * 3),
        _POINTER,
        *([_INT64] * 6),
    ),
    "cb_store_kv_paired": (
        *(_POINTER, _INT64, _POINTER, _INT64, _POINTER, _POINTER, _INT64, _INT64),
        *(_POINTER, *[_INT64] * 5),
    ),
    "cb_rms_norm": (*[_POINTER] * 3, _INT64, _INT64, _FLOAT, _INT),
    "cb_rope": (_POINTER, _INT64, _POINTER, _POINTER, *[_INT64] * 4, _INT),
    "cb_linear": (
        *(_POINTER, _INT64, _POINTER, _POINTER, _POINTER, _FLOAT, _INT, _POINTER),
        *[_INT64] * 3,
    ),
    "cb_code_weight": (_POINTER, _INT64, _INT64, _INT, _POINTER),
    "cb_pack_weight": (_POINTER, _INT64, _INT64, _INT, _POINTER, _POINTER),
    "cb_unpack_outputs": (_POINTER, _POINTER, _INT64, _INT64, _POINTER),
    "cb_argmax": (*[_POINTER] * 3, _INT64, _INT64, _INT),
    "cb_begin_decoder": (_POINTER, _POINTER, _POINTER, _POINTER),
    "cb_help_decoder": (_POINTER,),
    "cb_end_decoder": (_POINTER,),
    "cb_way_of_pairs": (),
    "cb_has_int8": (),
}
_RETURNS_INT = (
    *("cb_attention", "cb_store_kv", "cb_store_kv_paired"),
    *("cb_begin_decoder", "cb_end_decoder"),
    *("cb_way_of_pairs", "cb_has_int8"),
)
_NAMES = ("C", "C, bfloat16 widened", "C, bfloat16 multiplied in pairs")
_DTYPES = (torch.float32, torch.bfloat16)
_LANES = 16
_MOST_HEAD_DIM = 256
_MOST_GROUP = 64
_PANEL = 64  # outputs that lie together in a packed weight
_PANEL_BYTES = 24  # of struct panel


class Kernels:
    """Operations on CPU tensors. Shapes as in `ops`; arguments were checked there."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        for name, signature in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes = signature
            function.restype = _INT if name in _RETURNS_INT else None
        library.cb_code_weight.restype = _INT64
        self.has_linear = library.cb_way_of_pairs() > 0
        self.has_decoder = self.has_linear  # the loader takes it back where its test fails
        self.int8 = Int8Kernels(library) if library.cb_has_int8() else None
        self.name = _NAMES[library.cb_way_of_pairs()]

    def takes_attention(self, q: Tensor, k_cache: Tensor, v_cache: Tensor) -> bool:
        """Any window, soft cap and sinks; head dimensions of whole vectors."""
        head_dim, group = q.shape[2], q.shape[1] // k_cache.shape[2]
        return (
            q.dtype in _DTYPES
            and head_dim % _LANES == 0
            and head_dim <= _MOST_HEAD_DIM
            and group <= _MOST_GROUP
            and k_cache.stride(3) == 1
            and k_cache.stride() == v_cache.stride()
        )

    def takes_paired(self, dtype: torch.dtype, block_size: int, head_dim: int, group: int) -> bool:
        """A paired cache is the kernels' alone: whatever a model asks of it must be theirs."""
        return (
            self.has_linear
            and dtype == torch.bfloat16
            and block_size % _LANES == 0
            and head_dim % _LANES == 0
            and head_dim <= _MOST_HEAD_DIM
            and group <= _MOST_GROUP
        )

    def attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: RaggedBatch,
        *,
        scale: float,
        sliding_window: int | None,
        soft_cap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        table, starts, lens = batch.host_rows()
        sinks = None if sinks is None else sinks.float().contiguous()
        out = torch.empty(q.shape, dtype=q.dtype)
        q, paired = _tokens_apart(q), k_cache.dim() == 5
        status = self.library.cb_attention(
            *(q.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), out.data_ptr()),
            *(table.data_ptr(), starts.data_ptr(), lens.data_ptr()),
            None if sinks is None else sinks.data_ptr(),
            *(q.stride(0), table.stride(0), *k_cache.stride()[:3]),
            *(q.shape[1], k_cache.shape[2], q.shape[2], k_cache.shape[0], k_cache.shape[1]),
            *(sliding_window or 0, scale, soft_cap or 0.0, lens.shape[0], q.shape[0]),
            *(q.dtype == torch.bfloat16, paired),
        )
        raise_for(status, "a row's block table names a block that the cache does not have")
        return out

    def takes_store(self, k_cache: Tensor, v_cache: Tensor) -> bool:
        return k_cache.stride(3) == 1 and k_cache.stride() == v_cache.stride()

    def store_kv(
        self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor
    ) -> None:
        k, v, slots = _tokens_apart(k), _tokens_apart(v), slots.long().contiguous()
        status = self.library.cb_store_kv(
            *(k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0)),
            *(k_cache.data_ptr(), v_cache.data_ptr(), *k_cache.stride()[:3], slots.data_ptr()),
            *(*k.shape, *k_cache.shape[:2], k.element_size()),
        )
        raise_for(status, "a slot is not in the cache")

    def store_kv_paired(
        self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor
    ) -> None:
        k, v, slots = _tokens_apart(k), _tokens_apart(v), slots.long().contiguous()
        status = self.library.cb_store_kv_paired(
            *(k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0), k_cache.data_ptr()),
            *(v_cache.data_ptr(), k_cache.stride(0), k_cache.stride(2), slots.data_ptr()),
            *(*k.shape, *k_cache.shape[:2]),
        )
        raise_for(status, "a slot is not in the cache")

    def takes_norm(self, x: Tensor, weight: Tensor) -> bool:
        return (
            x.dtype in _DTYPES
            and x.dtype == weight.dtype
            and weight.shape[0] % _LANES == 0
            and x.is_contiguous()
        )

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y, width = torch.empty_like(x), weight.shape[0]
        self.library.cb_rms_norm(
            *(x.data_ptr(), weight.data_ptr(), y.data_ptr(), x.numel() // width, width, eps),
            x.dtype == torch.bfloat16,
        )
        return y

    def takes_rope(self, x: Tensor, cos: Tensor, half: int) -> bool:
        return (
            x.dtype in _DTYPES
            and x.dtype == cos.dtype
            and half % _LANES == 0
            and x.stride()[1:] == (x.shape[2], 1)
            and cos.is_contiguous()
        )

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor, half: int) -> Tensor:
        """In place, and x itself."""
        self.library.cb_rope(
            *(x.data_ptr(), x.stride(0), cos.data_ptr(), sin.data_ptr(), *x.shape, half),
            x.dtype == torch.bfloat16,
        )
        return x

    def takes_linear(self, weight: Tensor, *, gated: bool) -> bool:
        width, depth = weight.shape
        return (
            self.has_linear
            and weight.dtype == torch.bfloat16
            and width % (_PANEL if gated else _LANES) == 0
            and depth % 2 == 0
        )

    def pack(self, weight: Tensor, *, gated: bool, pages: HugePages | None = None) -> Tensor:
        """weight [N, K] in 12 bits a number, as packed.h has it: bytes."""
        weight, (width, depth) = weight.contiguous(), weight.shape
        panels = torch.empty(-(-width // _PANEL) + 1, _PANEL_BYTES, dtype=torch.uint8)
        facts = (weight.data_ptr(), depth, width, gated, panels.data_ptr())
        size = self.library.cb_code_weight(*facts)
        packed = torch.empty(size, dtype=torch.uint8) if pages is None else pages.room(size)
        self.library.cb_pack_weight(*facts, packed.data_ptr())
        return packed

    def interleave(self, gate_up: Tensor) -> Tensor:
        """Rows (or numbers of a bias) of gate over up in the order of gated panels."""
        halves = gate_up.view(2, -1, _PANEL // 2, *gate_up.shape[1:])
        return halves.transpose(0, 1).reshape(gate_up.shape)

    def linear(
        self,
        x: Tensor,
        packed: Tensor,
        bias: Tensor | None,
        width: int,
        *,
        gated: bool,
        onto: Tensor | None = None,
        scale: float = 1.0,
    ) -> Tensor:
        """x [M, K] to [M, N] of `width` N, times `scale` and added onto [M, N] if that is given;
        gated: to silu(gate) * up [M, N / 2]."""
        if x.stride(1) != 1 or x.stride(0) % 2 or x.data_ptr() % 4:  # pairs are read as dwords
            x = x.clone(memory_format=torch.contiguous_format)
        onto = None if onto is None else onto.contiguous()
        y = torch.empty(x.shape[0], width // 2 if gated else width, dtype=x.dtype)
        self.library.cb_linear(
            *(x.data_ptr(), x.stride(0), packed.data_ptr()),
            None if bias is None else bias.data_ptr(),
            None if onto is None else onto.data_ptr(),
            *(scale, gated, y.data_ptr()),
            *(x.shape[0], x.shape[1], width),
        )
        return y


def _tokens_apart(x: Tensor) -> Tensor:
    """x [T, H, D] with each token's heads side by side, whatever lies between tokens."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()


def raise_for(status: int, what: str) -> None:
    if status == 1:
        raise MemoryError("no memory for the jobs of a step's attention")
    if status:
        raise IndexError(what)
