"""Linear layers of int8 weights, for the CPU: the kernel in C where it is, torch elsewhere."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from cb_kernels.cpu.library import kernels
from cb_kernels.huge_pages import HugePages
from cb_kernels.int8 import linear_int8, quantize_weight
from cb_kernels.shapes import check_bias, check_onto


class Int8Linear:
    """x W^T + b of a weight [N, K] that is rounded here; x is rounded at each call.

    `gated`: the weight's rows are those of gate, then those of up, and the product is
    silu(gate) * up.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        *,
        gated: bool,
        pages: HugePages | None = None,
    ) -> None:
        """`pages`: where the weight will lie; None: where torch puts it."""
        if weight.device.type != "cpu":
            raise ValueError(f"int8 weights are for the CPU, got one on {weight.device}")
        check_bias(bias, weight)
        self.width, self.depth = weight.shape
        self.gated = gated
        self.bias = bias
        self._dtype = weight.dtype
        values, self.scales = quantize_weight(weight)
        c = kernels()
        self._c = None if c is None else c.int8
        if c is None or c.int8 is None or not c.int8.takes(self.width, weight.dtype, gated=gated):
            self.packed: Tensor | None = None  # torch multiplies
            self._values = values
            return
        if gated:
            values, self.scales = c.interleave(values), c.interleave(self.scales)
            self.bias = None if bias is None else c.interleave(bias)
        self.packed = c.int8.pack(values, pages)

    def __call__(self, x: Tensor, onto: Tensor | None = None, scale: float = 1.0) -> Tensor:
        """x [..., K] to [..., N], times `scale` and added onto [..., N] if that is given; gated:
        to silu(gate) * up [..., N / 2]. Raises ValueError on another K or dtype, of `onto` too."""
        if x.shape[-1] != self.depth or x.dtype != self._dtype:
            raise ValueError(
                f"x must be {self._dtype} [..., {self.depth}], got {x.dtype} {tuple(x.shape)}"
            )
        check_onto(onto, x, self.width, gated=self.gated)
        rows = x.reshape(-1, self.depth)
        flat = None if onto is None else onto.reshape(-1, onto.shape[-1])
        if self.packed is None:
            y = self._by_torch(rows, flat, scale)
        else:
            assert self._c is not None
            y = self._c.linear(
                *(rows, self.packed, self.scales, self.bias),
                gated=self.gated,
                onto=flat,
                scale=scale,
            )
        return y.view(*x.shape[:-1], y.shape[1])

    def _by_torch(self, x: Tensor, onto: Tensor | None, scale: float) -> Tensor:
        y = linear_int8(x, self._values, self.scales, self.bias)
        if self.gated:
            gate, up = y.chunk(2, -1)
            y = F.silu(gate) * up
        elif onto is not None:
            y = onto.float() + y * scale
        return y.to(x.dtype)
