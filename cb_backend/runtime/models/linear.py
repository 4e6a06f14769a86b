"""Linear layers with their weights where and how the device multiplies fastest.

On the CPU a weight is packed once and the plain copy is dropped: bfloat16 for the kernel in C where
there is one (3 to 64% faster than oneDNN on layers at 8 to 64 rows, as fast at 512), else into
oneDNN's blocked layout (two to three times faster than plain). Or it is rounded to int8: half the
bytes to read, and 1.5 to 2 times as fast. On a GPU it stays as it is. Engine thread.
"""

from __future__ import annotations

import functools
import logging

import torch
import torch.nn.functional as F
from cb_kernels import (
    HugePages,
    Int8Linear,
    PackedLinear,
    invariant_linear,
    pack_linear,
    silu_and_mul,
    uses_triton,
)
from torch import Tensor, nn

logger = logging.getLogger(__name__)

# The rows a weight is packed for. Any of 4 to 256 serves every row count equally (measured).
_PACK_ROWS = 16


class Linear(nn.Module):
    """y = x @ weight.T + bias. `weight` [out, in] may be filled in parts before it is packed.

    `gated`: the weight is gate over up, and y is silu(gate) * up, half as wide as the weight.
    Otherwise y may be scaled and added `onto` another: a residual costs no pass of its own.
    `invariant`: a row of y has the same bits whatever rows come with it; for GPUs.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        gated: bool = False,
        invariant: bool = False,
    ) -> None:
        super().__init__()
        self._invariant = invariant and uses_triton(weight)
        self.weight: Tensor | None = weight
        self.bias = bias
        self._gated = gated
        self._packed: Tensor | None = None
        self.kernel: PackedLinear | Int8Linear | None = None

    def pack(self, pages: HugePages | None = None) -> None:
        """Give the weight its final layout, in `pages` if it is our kernel's; from now on
        `weight` may be gone."""
        if self.weight is None or self._invariant:
            return
        self.kernel = pack_linear(self.weight, self.bias, gated=self._gated, pages=pages)
        if self.kernel is not None:
            self.weight = None
        elif can_pack(self.weight.device.type, self.weight.dtype):
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight, _PACK_ROWS)
            self.weight = None

    def quantize(self, pages: HugePages | None = None) -> None:
        """Round the weight to int8, instead of `pack`."""
        assert self.weight is not None
        self.kernel = Int8Linear(self.weight, self.bias, gated=self._gated, pages=pages)
        self.weight = None

    def forward(self, x: Tensor, onto: Tensor | None = None, scale: float = 1.0) -> Tensor:
        if self.kernel is not None:
            return self.kernel(x, onto, scale)
        y = self._product(x)
        if self._gated:
            return silu_and_mul(y)
        return y if onto is None else torch.add(onto, y, alpha=scale)

    def _product(self, x: Tensor) -> Tensor:
        if self._packed is None:
            assert self.weight is not None
            if self._invariant:
                return invariant_linear(x, self.weight, self.bias)
            return F.linear(x, self.weight, self.bias)
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return y


@functools.cache
def can_pack(device_type: str, dtype: torch.dtype) -> bool:
    """Whether packed products exist here and agree with plain ones. Logged once per dtype."""
    if device_type != "cpu":
        return False
    reason = _packing_fault(dtype)
    if reason is None:
        logger.info("linear layers: weights packed for oneDNN (%s)", dtype)
    else:
        logger.warning("linear layers: weights not packed, %s (%s)", reason, dtype)
    return reason is None


def _packing_fault(dtype: torch.dtype) -> str | None:
    """Why packing cannot be used. The operators are private to torch, so they are tried first."""
    if dtype not in (torch.float32, torch.bfloat16):
        return "dtype has no packed product"
    if not torch.backends.mkldnn.is_available():
        return "torch was built without oneDNN"
    if not hasattr(torch.ops.mkldnn, "_reorder_linear_weight") or not hasattr(
        torch.ops.mkldnn, "_linear_pointwise"
    ):
        return "this torch has no packed product"
    weight = torch.linspace(-1, 1, 48 * 32).reshape(48, 32).to(dtype)
    x = torch.linspace(-1, 1, 5 * 32).reshape(5, 32).to(dtype)
    try:
        packed = Linear(weight)
        packed._packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_ROWS)
        difference = (packed(x) - F.linear(x, weight)).abs().max().item()
    except RuntimeError as error:
        return f"the packed product failed: {error}"
    # Both sum the same 32 products of at most 1; bfloat16 keeps 8 bits of the result.
    allowed = 1e-4 if dtype == torch.float32 else 0.25
    return None if difference <= allowed else f"the packed product is off by {difference}"
