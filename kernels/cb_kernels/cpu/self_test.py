"""What is asked of a freshly loaded library before it is trusted: to agree with torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from cb_kernels import torch_impl
from cb_kernels.cpu.argmax import argmax
from cb_kernels.cpu.kernels import Kernels
from cb_kernels.int8 import linear_int8, quantize_weight
from cb_kernels.ragged import RaggedBatch

# Relative above 1. bfloat16 keeps 8 bits, and torch rounds to it at every step on the way.
ALLOWED = {torch.float32: 1e-4, torch.bfloat16: 3e-2}


def fault_of(kernels: Kernels) -> str | None:
    """The first operation that differs from torch, or None."""
    for dtype in ALLOWED:
        checks = {"attention": _attention, "rms_norm": _rms_norm, "rope": _rope, "argmax": _argmax}
        if dtype == torch.bfloat16:
            checks |= {"linear": _linear, "gated linear": _gated}
        if kernels.int8 is not None:
            checks |= {"int8 linear": _int8, "gated int8 linear": _gated_int8}
        for name, check in checks.items():
            actual, expected = check(kernels, dtype)
            difference = difference_of(actual, expected)
            if not difference <= ALLOWED[dtype]:  # NaN is a fault too
                return f"{name} in {dtype} is off by {difference:.2g}"
    return None


def difference_of(actual: Tensor, expected: Tensor) -> float:
    """The largest, as `ALLOWED` counts it."""
    expected = expected.float()
    return ((actual.float() - expected).abs() / (1 + expected.abs())).max().item()


def _numbers(*shape: int, dtype: torch.dtype) -> Tensor:
    """Between -1 and 1, without touching anyone's random state."""
    count = torch.Size(shape).numel()
    return torch.sin(torch.arange(1, count + 1, dtype=torch.float64) * 1.7).view(shape).to(dtype)


def _attention(kernels: Kernels, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A decoding row over several tiles of keys, and a chunk after earlier keys."""
    block_size, num_blocks, head_dim = 8, 16, 48
    k, v = _numbers(2, 2, num_blocks, block_size, head_dim, dtype=dtype).permute(0, 2, 3, 1, 4)
    batch = RaggedBatch(
        block_table=torch.arange(num_blocks - 1, -1, -1, dtype=torch.int32).view(2, 8).flip(1),
        query_start_loc=[0, 1, 6],
        seq_lens=[61, 13],
        block_size=block_size,
    )
    q = _numbers(6, 6, head_dim, dtype=dtype)
    options = {"scale": 0.3, "sliding_window": None, "soft_cap": None, "sinks": None}
    return (
        kernels.attention(q, k, v, batch, **options),  # type: ignore[arg-type]
        torch_impl.paged_attention(q, k, v, batch, **options),  # type: ignore[arg-type]
    )


def _rms_norm(kernels: Kernels, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x, weight = _numbers(5, 80, dtype=dtype), _numbers(80, dtype=dtype)
    return kernels.rms_norm(x, weight, 1e-5), F.rms_norm(x, (80,), weight, 1e-5)


def _rope(kernels: Kernels, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x, turns = _numbers(5, 3, 80, dtype=dtype), _numbers(2, 5, 1, 80, dtype=dtype)
    expected = torch_impl.rope(x, turns[0], turns[1], 32)
    # Past the rotary part the kernel leaves x, where torch multiplies: these cos are not 1.
    return kernels.rope(x.clone(), turns[0], turns[1], 32)[..., :64], expected[..., :64]


def _argmax(kernels: Kernels, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x = _numbers(3, 1200, dtype=dtype)
    return argmax(kernels.library, x)[0], x.float().argmax(-1)


def _linear(kernels: Kernels, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x, weight, bias = (_numbers(*shape, dtype=dtype) / 8 for shape in ((9, 64), (80, 64), (80,)))
    onto = _numbers(9, 80, dtype=dtype)
    packed = kernels.pack(weight, gated=False)
    actual = kernels.linear(x, packed, bias, 80, gated=False, onto=onto, scale=0.5)
    return actual, onto + F.linear(x, weight, bias) * 0.5


def _gated(kernels: Kernels, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x, weight = _numbers(9, 64, dtype=dtype) / 8, _numbers(128, 64, dtype=dtype)
    gate, up = F.linear(x, weight).chunk(2, -1)
    packed = kernels.pack(weight, gated=True)
    return kernels.linear(x, packed, None, 128, gated=True), F.silu(gate) * up


def _int8(kernels: Kernels, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Ragged in rows, outputs and groups."""
    c = kernels.int8
    assert c is not None
    x, weight, bias = (_numbers(*shape, dtype=dtype) / 8 for shape in ((8, 150), (80, 150), (80,)))
    onto = _numbers(8, 80, dtype=dtype)
    values, scales = quantize_weight(weight)
    actual = c.linear(x, c.pack(values), scales, bias, gated=False, onto=onto, scale=0.5)
    return actual, onto.float() + linear_int8(x, values, scales, bias) * 0.5


def _gated_int8(kernels: Kernels, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    c = kernels.int8
    assert c is not None
    x, weight = _numbers(8, 64, dtype=dtype) / 8, _numbers(128, 64, dtype=dtype)
    values, scales = quantize_weight(weight)
    gate, up = linear_int8(x, values, scales, None).chunk(2, -1)
    packed, scales = c.pack(kernels.interleave(values)), kernels.interleave(scales)
    return c.linear(x, packed, scales, None, gated=True), F.silu(gate) * up
