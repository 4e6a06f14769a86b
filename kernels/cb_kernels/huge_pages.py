"""Memory in huge pages, for weights that are read from end to end at every token.

In pages of 4 KiB a processor that streams memory looks up an address every 4 KiB, and under a
hypervisor each look-up is a walk through two tables: that took half of what could be read.
"""

from __future__ import annotations

import contextlib
import mmap

import torch
from torch import Tensor

_HUGE = 2**21  # bytes
_CHUNK = 2**28  # of addresses; of memory what is used, and the rest of the last page
_LINE = 64


class HugePages:
    """Cuts tensors out of chunks that the system is asked to back with huge pages.

    Ordinary memory where it has none to give. A chunk lives as long as a tensor in it. What no
    tensor has taken is not resident, but for the rest of a page. CPU; one thread.
    """

    def __init__(self) -> None:
        self._rest = torch.empty(0, dtype=torch.uint8)

    def room(self, num_bytes: int) -> Tensor:
        """Bytes that start at a cache line."""
        if num_bytes > len(self._rest):
            try:
                self._rest = _chunk(max(_CHUNK, num_bytes))
            except OSError:  # no room for a whole chunk
                return torch.empty(num_bytes, dtype=torch.uint8)
        taken = self._rest[:num_bytes]
        self._rest = self._rest[-(-num_bytes // _LINE) * _LINE :]
        return taken

    def copy(self, x: Tensor) -> Tensor:
        """A contiguous copy that starts at a cache line."""
        return self.room(x.numel() * x.element_size()).view(x.dtype).view(x.shape).copy_(x)


def _chunk(num_bytes: int) -> Tensor:
    # Not by torch: the request has to come before the first touch, and at a huge page's start.
    memory = mmap.mmap(-1, num_bytes + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError, AttributeError):  # a system without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    return whole[-whole.data_ptr() % _HUGE :]
