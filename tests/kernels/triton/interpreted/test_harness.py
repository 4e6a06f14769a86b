"""The interpreter rounds like a GPU, and mistakes of a kernel with memory are found."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from cb_kernels.triton.launch import launch
from torch import Tensor

_FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2]


@triton.jit
def _copy(source_ptr, target_ptr, count, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(source_ptr + index, mask=index < count)
    tl.store(target_ptr + index, values.to(target_ptr.dtype.element_ty), mask=index < count)


@triton.jit
def _copy_past_the_end(source_ptr, target_ptr, count, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target_ptr + index, tl.load(source_ptr + index), mask=index < count)


@triton.jit
def _overlapping_stores(target_ptr, BLOCK: tl.constexpr):
    index = tl.program_id(0) * (BLOCK // 2) + tl.arange(0, BLOCK)
    tl.store(target_ptr + index, index)


@triton.jit
def _read_of_the_neighbour(target_ptr, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    index = tl.arange(0, BLOCK)
    left = tl.load(target_ptr + (program - 1) * BLOCK + index, mask=(program > 0) & (index >= 0))
    tl.store(target_ptr + program * BLOCK + index, left + 1)


@triton.jit
def _store_over_what_others_read(target_ptr, BLOCK: tl.constexpr):
    index = tl.arange(0, BLOCK)
    total = tl.sum(tl.load(target_ptr + index))
    tl.store(target_ptr + tl.program_id(0), total, mask=tl.program_id(0) == 1)


@triton.jit
def _lanes_that_meet(target_ptr, BLOCK: tl.constexpr):
    index = tl.arange(0, BLOCK)
    tl.store(target_ptr + index // 2, index)


@triton.jit
def _sum_in_bfloat16(source_ptr, target_ptr, BLOCK: tl.constexpr):
    x = tl.load(source_ptr + tl.arange(0, BLOCK))
    tl.store(target_ptr + tl.arange(0, BLOCK), x + x)


@triton.jit
def _product(a_ptr, b_ptr, out_ptr, N: tl.constexpr):
    index = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    product = tl.dot(tl.load(a_ptr + index), tl.load(b_ptr + index))
    tl.store(out_ptr + index, product)


@triton.jit
def _sum_up_to(limits_ptr, out_ptr):
    total = 0
    for i in range(tl.load(limits_ptr), tl.load(limits_ptr + 1)):
        total += i
    tl.store(out_ptr, total)


def _cast(values: Tensor, dtype: torch.dtype) -> Tensor:
    target = torch.zeros(values.shape, dtype=torch.uint8).to(dtype)
    launch(_copy, (1,), values, target, len(values), BLOCK=triton.next_power_of_2(len(values)))
    return target


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, *_FLOAT8], ids=str)
def test_casts_round_to_nearest_even(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    largest = min(torch.finfo(dtype).max, 1e4)
    values = torch.cat((torch.randn(3000) * 3, torch.randn(1000) * 1e-4)).clamp(-largest, largest)
    expected = values.to(dtype)
    assert torch.equal(_cast(values, dtype).float(), expected.float())
    assert torch.equal(_cast(expected, torch.float32), expected.float())


@pytest.mark.parametrize("dtype", _FLOAT8, ids=str)
def test_float8_saturates(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    cast = _cast(torch.tensor([1e9, -1e9, torch.inf, -torch.inf]), dtype)
    assert cast.float().tolist() == [largest, -largest, largest, -largest]
    assert bool(_cast(torch.tensor([torch.nan]), dtype).float().isnan().all())


def test_a_product_of_bfloat16_is_summed_in_float32() -> None:
    a, b = torch.randn(2, 32, 32).bfloat16()
    out = torch.full((32, 32), 777.0)
    launch(_product, (1,), a, b, out, N=32)
    torch.testing.assert_close(out.double(), a.double() @ b.double(), atol=1e-5, rtol=1e-5)


def test_arithmetic_in_bfloat16_is_refused() -> None:
    x = torch.zeros(16, dtype=torch.bfloat16)
    with pytest.raises(Exception, match="must convert to float32"):
        launch(_sum_in_bfloat16, (1,), x, torch.empty_like(x), BLOCK=16)


def test_loaded_bounds_of_a_loop_are_read() -> None:
    out = torch.zeros(1, dtype=torch.int32)
    launch(_sum_up_to, (1,), torch.tensor([3, 6], dtype=torch.int32), out)
    assert out.item() == 12


def test_a_kernel_without_mistakes_passes() -> None:
    source = torch.arange(100, dtype=torch.int32)
    target = torch.full((100,), -1, dtype=torch.int32)
    launch(_copy, (4,), source, target, 100, BLOCK=32)
    assert torch.equal(source, target)


def test_a_planted_load_out_of_bounds_is_found() -> None:
    source = torch.zeros(200, dtype=torch.int32)[50:150]  # the memory around it is no excuse
    with pytest.raises(Exception, match=r"out of bounds.* 0 bytes past"):
        launch(_copy_past_the_end, (4,), source, torch.zeros(100, dtype=torch.int32), 100, BLOCK=32)


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (_overlapping_stores, "program 1 stores where program 0 stored"),
        (_read_of_the_neighbour, "program 1 reads what program 0 stores"),
        (_store_over_what_others_read, "program 1 stores where several programs read"),
        (_lanes_that_meet, "two lanes of program 0"),
    ],
    ids=["overlapping-stores", "read-after-write", "write-after-read", "duplicate-lanes"],
)
def test_a_planted_race_is_found(kernel: object, message: str) -> None:
    target = torch.zeros(64, dtype=torch.int32)
    with pytest.raises(Exception, match=message):
        launch(kernel, (2,), target, BLOCK=32)
