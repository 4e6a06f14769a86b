"""Weights of 12 bits a number come out bit for bit, and are multiplied as they were."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from cb_kernels.cpu.kernels import Kernels
from cb_kernels.cpu.unpack import unpack_outputs
from torch import Tensor

BF16 = torch.bfloat16


def bits(*shape: int) -> Tensor:
    """Any at all: nearly no row of a panel has 16 upper bytes or fewer."""
    return torch.randint(-(2**15), 2**15, shape, dtype=torch.int16).view(BF16)


def outliers(width: int, depth: int) -> Tensor:
    """One number in a hundred is of another magnitude, or none."""
    weight = torch.randn(width, depth)
    weight *= 2.0 ** torch.randint(-90, 90, weight.shape).where(torch.rand_like(weight) < 0.01, 0)
    weight[torch.rand_like(weight) < 0.01] = float("nan")
    weight[torch.rand_like(weight) < 0.01] = 0.0
    return weight.to(BF16)


KINDS: dict[str, Callable[[int, int], Tensor]] = {
    "normal": lambda *shape: torch.randn(*shape).to(BF16),
    "any bits": bits,
    "outliers": outliers,
    "zeros": lambda *shape: torch.zeros(*shape, dtype=BF16),
    "minus zeros": lambda *shape: torch.full(shape, -0.0, dtype=BF16),
    "one number": lambda *shape: torch.full(shape, 1.5, dtype=BF16),
    "17 upper bytes": lambda width, depth: (
        (torch.arange(width * depth) % 17 * 256 + 3).to(torch.int16).view(BF16).view(width, depth)
    ),
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize(("width", "depth"), [(16, 2), (64, 34), (208, 64), (1024, 600)])
def test_a_weight_comes_out_bit_for_bit(
    of_processor: Kernels, kind: Callable[[int, int], Tensor], width: int, depth: int
) -> None:
    torch.manual_seed(0)
    weight = kind(width, depth)
    packed = of_processor.pack(weight, gated=False)
    found = unpack_outputs(of_processor.library, packed, torch.arange(width), depth)
    assert torch.equal(found.view(torch.int16), weight.view(torch.int16))


def test_what_is_cut_out_of_a_larger_weight_is_packed_as_it_is(of_processor: Kernels) -> None:
    weight = torch.randn(64, 200).to(BF16)[:, 50:100]
    packed = of_processor.pack(weight, gated=False)
    assert torch.equal(unpack_outputs(of_processor.library, packed, torch.arange(64), 50), weight)


def test_a_weight_takes_little_more_than_12_bits_a_number(of_processor: Kernels) -> None:
    torch.manual_seed(0)
    weight = (torch.randn(576, 1536) * 0.05).to(BF16)
    assert of_processor.pack(weight, gated=False).numel() < 12.5 / 8 * weight.numel()


@pytest.mark.parametrize("gated", [False, True], ids=["", "gated"])
@pytest.mark.parametrize("rows", [1, 3, 6, 7, 13, 30, 129])
@pytest.mark.parametrize("depth", [8, 96, 700, 2600])
def test_rows_that_are_kept_whole_are_multiplied_like_the_others(
    of_processor: Kernels, depth: int, rows: int, gated: bool
) -> None:
    """Further inputs that are zero change no bit of a product, and their weights, of any magnitude,
    are rows without codes between the others."""
    torch.manual_seed(depth + rows)
    width, further = 320 if gated else 208, depth // 4 * 2
    x, weight = torch.randn(rows, depth).to(BF16), torch.randn(width, depth).to(BF16)
    exotic = (2.0 ** torch.randint(-100, 100, (width, further))).to(BF16)
    order = torch.randperm((depth + further) // 2)
    alone = order[order < depth // 2]

    def product(x: Tensor, weight: Tensor, order: Tensor) -> Tensor:
        packed = of_processor.pack(pairs_in(order, weight), gated=gated)
        return of_processor.linear(pairs_in(order, x), packed, None, width, gated=gated)

    expected = product(x, weight, alone)
    wider_x, wider = torch.cat([x, x.new_zeros(rows, further)], 1), torch.cat([weight, exotic], 1)
    assert torch.equal(product(wider_x, wider, order), expected)
    if not gated:
        exact = x.double() @ weight.double().T
        assert (expected.double() - exact).abs().max() <= 0.004 * exact.abs().max()


def pairs_in(order: Tensor, x: Tensor) -> Tensor:
    """Those of x's columns."""
    return x.unflatten(1, (-1, 2))[:, order].flatten(1)
