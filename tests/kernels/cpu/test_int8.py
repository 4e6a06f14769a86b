"""Int8 products: the kernel in C gives what torch gives, and both follow the exact product."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from cb_kernels import Int8Linear
from cb_kernels.cpu.int8 import Int8Kernels
from cb_kernels.cpu.library import kernels
from cb_kernels.int8 import GROUP, linear_int8, quantize_rows, quantize_weight
from torch import Tensor

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2}  # of y's own rounding
SHAPES = [(16, 3), (80, 34), (128, 1500), (192, 64), (208, 130), (64, 577)]
EXACT = 0.012  # of the norm: 8 bits for each of two factors


@pytest.fixture(name="c")
def _c() -> Int8Kernels:
    loaded = kernels()
    if loaded is None or loaded.int8 is None:
        pytest.skip("no int8 products in C on this machine")
    return loaded.int8


def numbers(rows: int, width: int, depth: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x, weight, bias."""
    torch.manual_seed(0)
    weight = torch.randn(width, depth) * depth**-0.5
    return torch.randn(rows, depth).to(dtype), weight.to(dtype), torch.randn(width).to(dtype)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 7, 25, 95, 97, 300])
@pytest.mark.parametrize(("width", "depth"), SHAPES)
def test_c_gives_what_torch_gives(
    c: Int8Kernels, width: int, depth: int, rows: int, dtype: torch.dtype
) -> None:
    x, weight, bias = numbers(rows, width, depth, dtype)
    onto = torch.randn(rows, width).to(dtype)
    linear = Int8Linear(weight, bias, gated=False)
    assert linear.packed is not None
    expected = linear_int8(x, *quantize_weight(weight), bias)
    tolerance = {"atol": TOLERANCES[dtype], "rtol": TOLERANCES[dtype]}
    torch.testing.assert_close(linear(x).float(), expected, **tolerance)
    actual = linear(x, onto, 0.5).float()
    torch.testing.assert_close(actual, onto.float() + expected * 0.5, **tolerance)
    if width % 64 == 0:
        gate, up = expected.chunk(2, -1)
        actual = Int8Linear(weight, bias, gated=True)(x).float()
        torch.testing.assert_close(actual, F.silu(gate) * up, **tolerance)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("width", [32, 50], ids=["C", "torch"])
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_it_follows_the_exact_product(gated: bool, width: int, dtype: torch.dtype) -> None:
    x, weight, bias = numbers(9, 4 * width, 150, dtype)
    exact = F.linear(x.double(), weight.double(), bias.double())
    if gated:
        gate, up = exact.chunk(2, -1)
        exact = F.silu(gate) * up
    actual = Int8Linear(weight, bias, gated=gated)(x.view(3, 3, 150)).view(9, -1).double()
    assert (actual - exact).norm() / exact.norm() < EXACT


@pytest.mark.parametrize("width", [64, 50], ids=["C", "torch"])
def test_a_large_input_takes_precision_only_from_its_neighbours(width: int) -> None:
    x, weight, _ = numbers(5, width, 4 * GROUP, torch.float32)
    x[:, 7], weight[:, 7] = 3000.0, 0.0  # none of its neighbours reaches half a step
    exact = F.linear(x[:, GROUP:].double(), weight[:, GROUP:].double())
    actual = Int8Linear(weight, None, gated=False)(x).double()
    assert (actual - exact).norm() / exact.norm() < EXACT


def test_a_row_gives_the_same_bits_alone_and_among_others(c: Int8Kernels) -> None:
    x, weight, bias = numbers(131, 192, 577, torch.bfloat16)
    linear = Int8Linear(weight, bias, gated=True)
    together = linear(x)
    for row in (0, 1, 64, 130):
        assert torch.equal(linear(x[row : row + 1]), together[row : row + 1])


@pytest.mark.parametrize("width", [64, 50], ids=["C", "torch"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf], ids=str)
def test_a_row_that_is_not_finite_stays_alone_and_shows(width: int, bad: float) -> None:
    x, weight, bias = numbers(12, width, 100, torch.bfloat16)
    linear = Int8Linear(weight, bias, gated=False)
    clean = linear(x)
    x[5, 99] = bad
    hurt = linear(x)
    assert bool(hurt[5].isnan().all())
    others = torch.arange(12) != 5
    assert torch.equal(hurt[others], clean[others])


@pytest.mark.parametrize("width", [64, 50], ids=["C", "torch"])
@pytest.mark.parametrize("scale", [0.0, 1e-38, 1e-20, 1e30], ids=str)
def test_very_small_and_very_large_inputs(width: int, scale: float) -> None:
    x, weight, _ = numbers(4, width, 100, torch.float32)
    exact = F.linear((x * scale).double(), weight.double())
    actual = Int8Linear(weight, None, gated=False)(x * scale).double()
    if scale < 1e-30:
        assert not actual.any(), "what is that small counts as zero"
    else:
        assert (actual - exact).norm() / exact.norm() < EXACT


def test_rounding_is_to_the_nearest_of_255_steps() -> None:
    x = torch.tensor([[127.0, -127.0, 0.5, 1.5, -63.4, 0.0]])
    values, scales = quantize_rows(x)
    assert values[0, 0, :6].tolist() == [127, -127, 0, 2, -63, 0]
    assert values.shape == (1, 1, GROUP)
    assert scales.tolist() == [[1.0]]
    weight, weight_scales = quantize_weight(torch.tensor([[2.54, -0.02], [0.0, 0.0]]))
    assert weight.tolist() == [[127, -1], [0, 0]]
    torch.testing.assert_close(weight_scales, torch.tensor([0.02, 0.0]))


@pytest.mark.parametrize("rows", [1, 3, 4])
@pytest.mark.parametrize("width", [16, 208, 512])
def test_the_same_bits_by_any_number_of_threads(c: Int8Kernels, width: int, rows: int) -> None:
    x, weight, bias = numbers(rows, width, 100, torch.bfloat16)
    before = torch.get_num_threads()
    try:
        for gated in (False, True) if width % 64 == 0 else (False,):
            linear = Int8Linear(weight, bias, gated=gated)
            results = []
            for count in (1, 2, 3, 7):
                torch.set_num_threads(count)
                results.append(linear(x))
            assert all(torch.equal(result, results[0]) for result in results)
    finally:
        torch.set_num_threads(before)


def test_rows_with_room_between_them_are_read_right(c: Int8Kernels) -> None:
    x, weight, _ = numbers(9, 64, 100, torch.bfloat16)
    wide = torch.cat((x, torch.full_like(x, 9.0)), 1)
    linear = Int8Linear(weight, None, gated=False)
    assert torch.equal(linear(wide[:, :100]), linear(x))
    assert torch.equal(linear(x.t().contiguous().t()), linear(x))


def test_it_refuses_what_it_would_read_as_something_else() -> None:
    linear = Int8Linear(torch.zeros(16, 6), None, gated=False)
    for wrong in (torch.zeros(2, 8), torch.zeros(2, 6, dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match=r"x must be torch.float32 \[\.\.\., 6\]"):
            linear(wrong)
    x = torch.zeros(2, 6)
    for wrong in (torch.zeros(2, 16, dtype=torch.bfloat16), torch.zeros(1, 16), torch.zeros(2, 15)):
        with pytest.raises(ValueError, match="cannot be added onto"):
            linear(x, wrong)
    for wrong in (torch.zeros(16, dtype=torch.bfloat16), torch.zeros(15)):
        with pytest.raises(ValueError, match="bias"):
            Int8Linear(torch.zeros(16, 6), wrong, gated=False)


def test_without_the_library_torch_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, bias = numbers(7, 128, 150, torch.bfloat16)
    with_c = Int8Linear(weight, bias, gated=True)(x)
    monkeypatch.setattr("cb_kernels.int8_linear.kernels", lambda: None)
    without = Int8Linear(weight, bias, gated=True)
    assert without.packed is None
    torch.testing.assert_close(with_c, without(x), atol=1e-2, rtol=1e-2)
