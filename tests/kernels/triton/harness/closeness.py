"""Whether a result is the float64 one, rounded once to what it is stored in."""

from __future__ import annotations

import torch
from torch import Tensor

# Half a unit in the last place, and a few roundings of float32 on the way.
TOLERANCES = {
    torch.float32: 4e-6,
    torch.float16: 2**-11 * 1.02,
    torch.bfloat16: 2**-8 * 1.02,
}


def assert_rounded(actual: Tensor, expected: Tensor, *, atol: float = 1e-6) -> None:
    """`atol`: what float32 loses where terms cancel."""
    tolerance = TOLERANCES[actual.dtype]
    torch.testing.assert_close(actual.double(), expected, atol=atol, rtol=tolerance)
