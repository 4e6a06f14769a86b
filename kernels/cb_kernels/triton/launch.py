"""The one rule that says which tensors Triton serves, and the one place that launches its kernels.

A launcher (the function that picks strides, tiles and grid for a kernel) runs the same three ways:
on a GPU; in Triton's interpreter, on CPU tensors, where TRITON_INTERPRET=1 was set before Python
started; and under `compile_only`, on tensors of the "meta" device, where kernels are compiled for
a chip that need not be there and nothing is computed. Imports no triton before it is needed.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cb_kernels.triton.chips import CHIPS, Chip, chip_of

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

# What the interpreter pretends to be: the launch table's rows for it are the ones that tests run.
_INTERPRETED_CHIP = CHIPS["sm_90"]


@dataclass(frozen=True, slots=True)
class Compiled:
    """One kernel as a launch would have it."""

    kernel: str
    options: Mapping[str, Any]  # tiles, num_warps, num_stages
    binary: Any  # triton.compiler.CompiledKernel


@dataclass(slots=True)
class Compilation:
    """What a `compile_only` block has compiled so far."""

    chip: Chip
    kernels: list[Compiled] = field(default_factory=list)


_compilation: Compilation | None = None


def uses_triton(tensor: Tensor) -> bool:
    """The dispatch rule. Raises RuntimeError for a GPU's tensor where triton is not installed."""
    if not (tensor.is_cuda or INTERPRETED or _compilation is not None):
        return False
    _require_triton()
    return True


def chip(tensor: Tensor) -> Chip:
    """The chip that a launch on this tensor is for."""
    if _compilation is not None:
        return _compilation.chip
    return chip_of(tensor.get_device()) if tensor.is_cuda else _INTERPRETED_CHIP


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Run `kernel` over `grid` (all at least 1; nothing runs otherwise), or only compile it.

    The first argument is a tensor and names the device.
    """
    if 0 in grid:
        return
    options["enable_fp_fusion"] = True  # by name: 3.9 warns of the default, which will change
    if _compilation is not None:
        binary = kernel.warmup(*args, grid=grid, **options)
        _compilation.kernels.append(Compiled(kernel.__name__, options, binary))
    elif not args[0].is_cuda or args[0].get_device() == torch.cuda.current_device():
        kernel[grid](*args, **options)
    else:
        with torch.cuda.device(args[0].device):
            kernel[grid](*args, **options)


@contextmanager
def compile_only(target: Chip) -> Iterator[Compilation]:
    """Within: all tensors go to Triton, and launches compile for `target` instead of running."""
    global _compilation
    _require_triton()
    from triton.runtime.driver import driver

    from cb_kernels.triton.no_driver import NoDriver

    before, driver_before = _compilation, driver._active
    driver.set_active(NoDriver(target))
    _compilation = Compilation(target)
    try:
        yield _compilation
    finally:
        _compilation = before
        driver._active = driver_before


@functools.cache
def _require_triton() -> None:
    if importlib.util.find_spec("triton") is None:
        raise RuntimeError(
            "tensors on a GPU need the package triton, which builds of torch for GPUs bring;"
            " install triton>=3.6"
        )
