"""The chips that the launch table knows, and which of them a tensor's device is.

The figures are those of NVIDIA's and AMD's architecture documents. Imports no triton.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Chip:
    """A kind of GPU. `name` is its key in the launch table."""

    name: str
    backend: str  # as Triton calls it
    arch: int | str
    warp_size: int
    num_processors: int  # streaming multiprocessors or compute units
    shared_bytes: int  # that one program may have


# sm_80's rows also serve sm_86, sm_89 and sm_120, whose programs may have 99 KiB.
CHIPS = {
    chip.name: chip
    for chip in (
        Chip("sm_80", "cuda", 80, 32, 108, 99 * 1024),
        Chip("sm_90", "cuda", 90, 32, 132, 227 * 1024),
        Chip("sm_100", "cuda", 100, 32, 148, 227 * 1024),
        Chip("gfx942", "hip", "gfx942", 64, 304, 64 * 1024),
    )
}


@functools.cache
def chip_of(index: int) -> Chip:
    """The nearest known chip, with the CUDA (or ROCm) device's own number of processors."""
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip is not None:
        name = "gfx942"
    else:
        name = {9: "sm_90", 10: "sm_100"}.get(properties.major, "sm_80")
    known = CHIPS[name]
    return Chip(
        *(name, known.backend, known.arch, known.warp_size),
        num_processors=properties.multi_processor_count,
        shared_bytes=known.shared_bytes,
    )
