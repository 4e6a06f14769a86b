"""The largest of a row: the kernel in C and the way without it, against torch's own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from cb_kernels import argmax
from cb_kernels.argmax import argmax_by_blocks
from torch import Tensor

Way = Callable[[Tensor], tuple[Tensor, Tensor]]
ways = pytest.mark.parametrize("way", [argmax, argmax_by_blocks])
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
WIDTHS = (1, 3, 16, 17, 199, 512, 513, 1024, 49152, 50257)


def _expected(logits: Tensor) -> tuple[Tensor, Tensor]:
    values, index = logits.float().max(-1)
    return index, values


@ways
@dtypes
@pytest.mark.parametrize("width", WIDTHS)
def test_it_is_the_first_of_the_largest(width: int, dtype: torch.dtype, way: Way) -> None:
    torch.manual_seed(width)
    # Few different numbers: nearly every row has its largest more than once.
    for logits in (torch.randn(9, width).to(dtype), torch.randint(-3, 3, (9, width)).to(dtype)):
        index, values = way(logits)
        wanted = (logits == logits.amax(-1, keepdim=True)).int().argmax(-1)
        assert torch.equal(index, wanted)
        assert torch.equal(values, logits.float().amax(-1))


@ways
@dtypes
@pytest.mark.parametrize("width", WIDTHS)
def test_a_nan_is_the_largest_wherever_it_stands(width: int, dtype: torch.dtype, way: Way) -> None:
    places = sorted({0, 1 % width, width // 2, width - 1})
    logits = torch.full((len(places), width), 5.0, dtype=dtype)
    for row, place in enumerate(places):
        logits[row, place] = float("nan")
        logits[row, -1] = float("inf") if place < width - 1 else float("nan")
    index, values = way(logits)
    assert values.isnan().all()
    assert index.tolist() == places


@ways
@dtypes
def test_infinities_are_numbers_like_others(dtype: torch.dtype, way: Way) -> None:
    logits = torch.full((3, 600), -float("inf"), dtype=dtype)
    logits[1, 571] = float("inf")
    logits[2, 571] = -3.0
    index, values = way(logits)
    assert index.tolist() == [0, 571, 571]
    assert values.tolist() == [-float("inf"), float("inf"), -3.0]


@ways
def test_rows_that_do_not_lie_together_and_none_at_all(way: Way) -> None:
    logits = torch.randn(20, 700)[::2, 3:650]
    assert all(torch.equal(a, b) for a, b in zip(way(logits), _expected(logits), strict=True))
    assert [len(part) for part in way(torch.empty(0, 32))] == [0, 0]


def test_rows_of_nothing_have_no_largest() -> None:
    with pytest.raises(ValueError, match="V > 0"):
        argmax(torch.empty(2, 0))
