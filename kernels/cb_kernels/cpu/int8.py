"""The int8 product in C with torch tensors for arguments."""

from __future__ import annotations

import ctypes

import torch
import torch.nn.functional as F
from torch import Tensor

from cb_kernels.huge_pages import HugePages
from cb_kernels.int8 import GROUP

_POINTER, _INT64, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
_DTYPES = (torch.float32, torch.bfloat16)
_LANES = 16
_PANEL = 64  # outputs that lie together in a packed weight
_GROUP_BYTES = GROUP + 8  # of a row's x, with scale and start


class Int8Kernels:
    """See linear_int8.c."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._linear = library.cb_linear_int8
        self._linear.argtypes = (
            *(_POINTER, _INT64, _POINTER, _POINTER, _POINTER, _POINTER, _FLOAT, _INT, _INT),
            *(_POINTER, _INT64, _INT64, _INT64, _POINTER),
        )
        self._linear.restype = None

    def takes(self, width: int, dtype: torch.dtype, *, gated: bool) -> bool:
        """`dtype` of x, bias and y."""
        return dtype in _DTYPES and width % (_PANEL if gated else _LANES) == 0

    def pack(self, values: Tensor, pages: HugePages | None = None) -> Tensor:
        """int8 [N, K] in panels [N / 64, K / 4, 64, 4] of bytes that are 128 larger."""
        width, depth = values.shape
        values = F.pad(values, (0, -depth % GROUP, 0, -width % _PANEL))
        panels = values.view(values.shape[0] // _PANEL, _PANEL, -1, 4).permute(0, 2, 1, 3)
        packed = panels.contiguous() if pages is None else pages.copy(panels)
        return packed.view(torch.uint8).bitwise_xor_(128)

    def room(self, num_rows: int, depth: int) -> Tensor:
        """Where the rows of x are rounded."""
        return torch.empty(num_rows * -(-depth // GROUP) * _GROUP_BYTES, dtype=torch.uint8)

    def linear(
        self,
        x: Tensor,
        packed: Tensor,
        scales: Tensor,
        bias: Tensor | None,
        *,
        gated: bool,
        onto: Tensor | None = None,
        scale: float = 1.0,
    ) -> Tensor:
        """x [M, K] to [M, N], times `scale` and added onto [M, N] if that is given; gated: to
        silu(gate) * up [M, N / 2]. Scales and bias in the order of the panels' columns."""
        x = x if x.stride(1) == 1 else x.contiguous()
        onto = None if onto is None else onto.contiguous()
        (num_rows, depth), width = x.shape, scales.shape[0]
        y = torch.empty(num_rows, width // 2 if gated else width, dtype=x.dtype)
        room = self.room(num_rows, depth)
        self._linear(
            *(x.data_ptr(), x.stride(0), packed.data_ptr(), scales.data_ptr()),
            None if bias is None else bias.data_ptr(),
            None if onto is None else onto.data_ptr(),
            *(scale, gated, x.dtype == torch.bfloat16, y.data_ptr(), num_rows, depth, width),
            room.data_ptr(),
        )
        return y
