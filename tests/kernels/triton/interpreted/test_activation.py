"""The gated activations agree with float64, far from zero too."""

from __future__ import annotations

import pytest
import torch
from cb_kernels import gelu_and_mul, reference, silu_and_mul
from torch import Tensor

from tests.kernels.triton.harness.closeness import TOLERANCES, assert_rounded

ACTIVATIONS = {
    "silu": silu_and_mul,
    "gelu": lambda x: gelu_and_mul(x, tanh=False),
    "gelu_tanh": lambda x: gelu_and_mul(x, tanh=True),
}


def _gate_up(width: int, dtype: torch.dtype) -> Tensor:
    torch.manual_seed(0)
    gate_up = torch.randn(3, 2 * width) * 3
    gate_up[0, :6] = torch.tensor([0.0, -0.0, 60.0, -60.0, 1e-20, -9.0])
    return gate_up.to(dtype)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("width", [12, 1536, 2100])
def test_an_activation_agrees_with_float64(name: str, width: int, dtype: torch.dtype) -> None:
    gate_up = _gate_up(width, dtype)
    actual = ACTIVATIONS[name](gate_up)
    assert actual.dtype == dtype
    assert_rounded(actual, reference.gated(gate_up, name))


def test_an_odd_width_is_refused() -> None:
    with pytest.raises(ValueError, match="must be of one width"):
        silu_and_mul(torch.zeros(2, 7))
