"""The norms agree with float64 on rows of odd widths, to half a unit of what they are stored in."""

from __future__ import annotations

import pytest
import torch
from cb_kernels import add_rms_norm, reference, rms_norm

from tests.kernels.triton.harness.closeness import TOLERANCES, assert_rounded

EPS = 1e-5


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("shape", [(37, 80), (3, 576), (2, 2304), (2, 5000)], ids=str)
def test_rms_norm_agrees_with_float64(shape: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(shape).to(dtype), torch.randn(shape[1]).to(dtype)
    actual = rms_norm(x, weight, EPS)
    assert actual.dtype == dtype
    assert_rounded(actual, reference.rms_norm(x, weight, EPS))


def test_a_weight_in_float32_keeps_its_precision() -> None:
    x, weight = torch.randn(5, 320).bfloat16(), torch.randn(320) + 1
    assert_rounded(rms_norm(x, weight, EPS), reference.rms_norm(x, weight, EPS))


def test_heads_are_normed_where_they_lie() -> None:
    heads = torch.randn(7, 9, 112).bfloat16()  # [T, H_q + 2 H_kv, D]
    q = heads[:, 1:6]
    expected = reference.rms_norm(q, weight := torch.randn(112).bfloat16(), EPS)
    assert_rounded(rms_norm(q, weight, EPS), expected)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_the_residual_is_added_and_rounded_before_the_norm(dtype: torch.dtype) -> None:
    x, residual = torch.randn(2, 3, 576).to(dtype)
    weight = torch.randn(576).to(dtype)
    normed, total = add_rms_norm(x, residual, weight, EPS, scale=0.75)
    _, expected_total = reference.add_rms_norm(x, residual, weight, EPS, 0.75)
    torch.testing.assert_close(total, expected_total, atol=1e-6, rtol=TOLERANCES[dtype] * 2)
    assert_rounded(normed, reference.rms_norm(total, weight, EPS))


def test_no_rows_are_no_launch() -> None:
    assert rms_norm(torch.empty(0, 64), torch.ones(64), EPS).shape == (0, 64)


def test_a_weight_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="does not fit x"):
        rms_norm(torch.ones(2, 64), torch.ones(65), EPS)
    with pytest.raises(ValueError, match="wider than the 16384"):
        rms_norm(torch.ones(1, 20000), torch.ones(20000), EPS)
