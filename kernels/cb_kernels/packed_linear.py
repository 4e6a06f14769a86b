"""Linear layers whose weights lie as the kernel in C reads them."""

from __future__ import annotations

import torch
from torch import Tensor

from cb_kernels.cpu.library import kernels
from cb_kernels.cpu.unpack import unpack_outputs
from cb_kernels.huge_pages import HugePages
from cb_kernels.shapes import check_bias, check_onto


class PackedLinear:
    """x W^T + b of a CPU weight in the layout of the kernel in C. See `pack_linear`."""

    def __init__(
        self, packed: Tensor, bias: Tensor | None, shape: torch.Size, *, gated: bool
    ) -> None:
        """`packed`: bytes, see packed.h; `shape`: the weight's, [N, K]."""
        self.width, self.depth = shape
        self.packed = packed
        self.bias = bias
        self.gated = gated

    def __call__(self, x: Tensor, onto: Tensor | None = None, scale: float = 1.0) -> Tensor:
        """x [..., K] to [..., N], times `scale` and added onto [..., N] if that is given; gated:
        to silu(gate) * up [..., N / 2]. Raises ValueError on another K or dtype, of `onto` too."""
        if x.shape[-1] != self.depth or x.dtype != torch.bfloat16:
            raise ValueError(
                f"x must be bfloat16 [..., {self.depth}], got {x.dtype} {tuple(x.shape)}"
            )
        check_onto(onto, x, self.width, gated=self.gated)
        c = kernels()
        assert c is not None
        rows = x.reshape(-1, x.shape[-1])
        y = c.linear(
            *(rows, self.packed, self.bias, self.width),
            gated=self.gated,
            onto=onto,
            scale=scale,
        )
        return y if x.dim() == 2 else y.view(*x.shape[:-1], y.shape[1])

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16

    def rows(self, indices: Tensor) -> Tensor:
        """Rows [T, K] of the weight as it was before it was packed, ungated. Raises IndexError."""
        first, last = (int(index) for index in indices.aminmax()) if len(indices) else (0, 0)
        if first < 0 or last >= self.width:
            raise IndexError(f"rows {first} to {last} of a weight of {self.width} rows")
        c = kernels()
        assert c is not None
        return unpack_outputs(c.library, self.packed, indices, self.depth)


def pack_linear(
    weight: Tensor, bias: Tensor | None, *, gated: bool, pages: HugePages | None = None
) -> PackedLinear | None:
    """A weight [N, K], packed for the kernel, without loss; None where there is no kernel for it.

    `gated`: its rows are those of gate, then those of up, and the product is silu(gate) * up.
    `pages`: where it lies then; None: where torch puts it. Raises ValueError for a bias that does
    not fit.
    """
    check_bias(bias, weight)
    c = kernels() if weight.device.type == "cpu" else None
    if c is None or not c.takes_linear(weight, gated=gated):
        return None
    if gated and bias is not None:
        bias = c.interleave(bias)
    packed = c.pack(weight, gated=gated, pages=pages)
    return PackedLinear(packed, bias, weight.shape, gated=gated)


def multiplies_bfloat16() -> bool:
    """Whether a CPU weight of bfloat16 has a kernel: half the bytes of float32, and as fast."""
    c = kernels()
    return c is not None and c.has_linear
