"""The batch-invariant linear layer agrees with float64, and with itself in any number of rows."""

from __future__ import annotations

import pytest
import torch
from cb_kernels import invariant_linear

from tests.kernels.triton.harness.closeness import TOLERANCES, assert_rounded


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("shape", [(1, 70, 80), (67, 130, 200), (3, 64, 1000)], ids=str)
def test_it_agrees_with_float64(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    num_rows, width, depth = shape
    x, weight = torch.randn(num_rows, depth).to(dtype), torch.randn(width, depth).to(dtype)
    bias = torch.randn(width).to(dtype)
    actual = invariant_linear(x, weight, bias)
    assert actual.dtype == dtype
    expected = x.double() @ weight.double().T + bias.double()
    assert_rounded(actual, expected, atol=2e-5)
    assert_rounded(invariant_linear(x, weight), expected - bias.double(), atol=2e-5)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_a_row_has_the_same_bits_in_any_number_of_rows(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(70, 300).to(dtype), torch.randn(90, 300).to(dtype)
    alone = torch.cat([invariant_linear(row[None], weight) for row in x[60:]])
    assert torch.equal(invariant_linear(x, weight)[60:], alone)
    assert torch.equal(invariant_linear(x[50:], weight)[10:], alone)


def test_rows_may_lie_in_any_shape() -> None:
    x, weight = torch.randn(2, 3, 32), torch.randn(16, 32)
    flat = invariant_linear(x.view(6, 32), weight)
    assert torch.equal(invariant_linear(x, weight), flat.view(2, 3, 16))
    assert torch.equal(invariant_linear(x.transpose(0, 1), weight)[1, 0], flat[1])


def test_what_does_not_fit_is_refused() -> None:
    x = torch.ones(2, 32)
    with pytest.raises(ValueError, match="does not fit x"):
        invariant_linear(x, torch.ones(4, 33))
    with pytest.raises(ValueError, match="does not fit x"):
        invariant_linear(x, torch.ones(4, 32).bfloat16())
    with pytest.raises(ValueError, match="a bias"):
        invariant_linear(x, torch.ones(4, 32), torch.ones(5))
