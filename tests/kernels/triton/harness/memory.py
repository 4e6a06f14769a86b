"""Checks on what an interpreted kernel reads and writes. They raise inside of the launch.

- An active lane of a load, a store or an atomic lies within a tensor that the launch was given.
- No two programs store to one address, no program reads what another stores, and no two lanes of
  one store meet: the interpreter runs programs in order, a GPU does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from triton.runtime import interpreter

Builder = interpreter.InterpreterBuilder

_NOBODY, _SEVERAL = -1, -2


class BadAccessError(AssertionError):
    """What a kernel did that a GPU would not forgive."""


@dataclass(slots=True)
class _Memory:
    """The memory of a launch, as one row of cells, each as large as its smallest element."""

    cell: int  # bytes
    starts: np.ndarray  # [spans], first address of each
    ends: np.ndarray
    firsts: np.ndarray  # [spans], each one's first cell
    writer: np.ndarray  # [cells], program or _NOBODY
    reader: np.ndarray  # [cells], program, _NOBODY or _SEVERAL

    @classmethod
    def of(cls, tensors: list[Tensor]) -> _Memory:
        spans: list[list[int]] = []
        for start, end in sorted(_span(tensor) for tensor in tensors if tensor.numel()):
            if spans and start <= spans[-1][1]:
                spans[-1][1] = max(spans[-1][1], end)
            else:
                spans.append([start, end])
        cell = min(tensor.element_size() for tensor in tensors)
        starts, ends = np.array(spans, dtype=np.int64).reshape(-1, 2).T
        firsts = np.concatenate(([0], np.cumsum(-(-(ends - starts) // cell))))
        nobody = np.full(firsts[-1], _NOBODY, np.int32)
        return cls(cell, starts, ends, firsts, nobody, nobody.copy())

    def cells(self, addresses: np.ndarray, size: int) -> np.ndarray:
        """The cells [lanes * n] of elements of `size` bytes."""
        span = np.searchsorted(self.starts, addresses, side="right") - 1
        inside = (span >= 0) & (addresses + size <= self.ends[np.maximum(span, 0)])
        if not inside.all():
            lane = int(np.argmin(inside))
            where = f"{addresses[lane] - self.ends[span[lane]]} bytes past the tensor before it"
            raise BadAccessError(f"out of bounds: lane {lane} of {len(inside)}, {where}")
        first = self.firsts[span] + (addresses - self.starts[span]) // self.cell
        return (first[:, None] + np.arange(size // self.cell)).ravel()

    def load(self, cells: np.ndarray, program: int) -> None:
        self._refuse("reads what", self.writer[cells], program)
        readers = self.reader[cells]
        alone = (readers == _NOBODY) | (readers == program)
        self.reader[cells] = np.where(alone, program, _SEVERAL)

    def store(self, cells: np.ndarray, program: int) -> None:
        self._refuse("stores where it", self.writer[cells], program, "stored")
        self._refuse("stores where it", self.reader[cells], program, "read")
        self.writer[cells] = program
        # Each lane leaves its number; where two meet only one of them stays.
        lanes = np.arange(len(cells), dtype=np.int32)
        before = self.reader[cells]
        self.reader[cells] = lanes
        alone = np.array_equal(self.reader[cells], lanes)
        self.reader[cells] = before
        if not alone:
            raise BadAccessError(f"race: two lanes of program {program} store to one address")

    def _refuse(self, does: str, others: np.ndarray, program: int, did: str = "stores") -> None:
        bad = (others != _NOBODY) & (others != program)
        if bad.any():
            other = int(others[np.argmax(bad)])
            name = "several programs" if other == _SEVERAL else f"program {other}"
            does = does.removesuffix(" it")
            raise BadAccessError(f"race: program {program} {does} {name} {did}")


_memory: _Memory | None = None


def install() -> None:
    """Patch the interpreter for the rest of the process."""
    interpreter.GridExecutor.__call__ = _watched(interpreter.GridExecutor.__call__)
    Builder.create_masked_load = _noting(Builder.create_masked_load, "load", mask_at=0)
    Builder.create_masked_store = _noting(Builder.create_masked_store, "store", mask_at=1)
    Builder.create_atomic_rmw = _noting_atomic(Builder.create_atomic_rmw)


def _span(tensor: Tensor) -> tuple[int, int]:
    """The first address of a tensor and the one past its last element."""
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _watched(original: Any) -> Any:
    def call(self: Any, *args: Any, **options: Any) -> None:
        global _memory
        tensors = [arg for arg in (*args, *options.values()) if isinstance(arg, torch.Tensor)]
        _memory = _Memory.of(tensors)
        try:
            original(self, *args, **options)
        finally:
            _memory = None

    return call


def _noting(original: Any, kind: str, *, mask_at: int) -> Any:
    def access(self: Any, pointers: Any, *rest: Any) -> Any:
        cells = _cells(pointers, rest[mask_at])
        if len(cells):
            assert _memory is not None
            (_memory.load if kind == "load" else _memory.store)(cells, _program(self))
        return original(self, pointers, *rest)

    return access


def _noting_atomic(original: Any) -> Any:
    def atomic(self: Any, op: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        _cells(pointers, mask)
        return original(self, op, pointers, value, mask, *rest)

    return atomic


def _cells(pointers: Any, mask: Any) -> np.ndarray:
    assert _memory is not None
    active = np.broadcast_to(np.asarray(mask.data, dtype=bool), pointers.data.shape)
    addresses = pointers.data[active].astype(np.int64)
    bits = pointers.get_element_ty().primitive_bitwidth
    return _memory.cells(addresses, max(1, bits // 8))


def _program(builder: Any) -> int:
    (x, y, z), (_, height, depth) = builder.grid_idx, builder.grid_dim
    return (x * height + y) * depth + z
