"""A driver for a GPU that is not there: enough of one for the JIT to compile, never to launch."""

from __future__ import annotations

import zlib
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

from cb_kernels.triton.chips import Chip


class NoDriver(DriverBase):
    """Presents one chip to `triton.runtime`."""

    def __init__(self, chip: Chip) -> None:
        super().__init__()
        self._target = GPUTarget(chip.backend, chip.arch, chip.warp_size)
        # The JIT keeps one cache of binaries per device index, and never asks what chip it is.
        self._index = zlib.crc32(chip.name.encode())

    @classmethod
    def is_active(cls) -> bool:
        return True

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return self._index

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_benchmarker(self) -> Any:
        raise NotImplementedError("there is no device to measure")
