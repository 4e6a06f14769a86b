"""Where weights lie: each in a place of its own, however many and however large."""

from __future__ import annotations

import gc

import pytest
import torch
from cb_kernels import HugePages, huge_pages

SHAPES = [(3, 5), (0,), (1,), (64, 64), (1000, 7), (), (300, 300), (2, 3, 4)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8], ids=str)
def test_copies_are_equal_aligned_and_apart(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huge_pages, "_CHUNK", 100_000)  # so that some begin a new one
    pages = HugePages()
    originals = [torch.randn(shape).mul(100).abs().to(dtype) for shape in SHAPES]
    copies = [pages.copy(original) for original in originals]
    for original, copied in zip(originals, copies, strict=True):
        assert torch.equal(original, copied)
        assert copied.is_contiguous()
        assert copied.data_ptr() % 64 == 0 or not copied.numel()
    for copied in copies:
        copied.zero_()
        others = [(o, c) for o, c in zip(originals, copies, strict=True) if c is not copied]
        assert all(torch.equal(o, c) for o, c in others)
        copied.copy_(originals[[c is copied for c in copies].index(True)])


def test_what_does_not_lie_in_a_row_is_laid_so() -> None:
    x = torch.arange(24.0).view(2, 3, 4).permute(2, 0, 1)
    copied = HugePages().copy(x)
    assert copied.is_contiguous()
    assert torch.equal(copied, x)


def test_one_larger_than_a_chunk_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "_CHUNK", 2**22)
    x = torch.ones(huge_pages._CHUNK + 5, dtype=torch.uint8)
    pages = HugePages()
    small, large, later = pages.copy(x[:3]), pages.copy(x), pages.copy(x[:3])
    assert int(large.sum(dtype=torch.int64)) == len(x)
    assert small.tolist() == later.tolist() == [1, 1, 1]


def test_a_tensor_outlives_the_pages_it_came_from() -> None:
    pages = HugePages()
    copied = pages.copy(torch.arange(1000))
    del pages
    gc.collect()
    assert copied.tolist() == list(range(1000))


def test_a_system_without_huge_pages_gives_ordinary_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    class Memory(huge_pages.mmap.mmap):
        def madvise(self, *_: int) -> None:
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(huge_pages.mmap, "mmap", Memory)
    assert HugePages().copy(torch.arange(5)).tolist() == [0, 1, 2, 3, 4]


def test_where_no_chunk_fits_a_weight_lies_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(huge_pages.mmap, "mmap", refuse)
    x = torch.arange(6).view(2, 3).T
    copied = HugePages().copy(x)
    assert copied.is_contiguous()
    assert torch.equal(copied, x)
