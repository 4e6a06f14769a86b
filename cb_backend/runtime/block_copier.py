"""Moves whole KV blocks: to another block, to the host tier, and back. Engine thread.

On CUDA the copies have a stream of their own. It waits for the steps before, and the next step
waits for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

import torch
from cb_kernels import copy_blocks, gather_blocks, scatter_blocks
from torch import Tensor

from cb_backend.core.step_io import BlockCopy, CopyKind
from cb_backend.runtime.kv_cache import KVCache


class BlockCopier:
    """Owns the host tier's memory: `num_host_blocks` blocks in the layout of the device's pool."""

    def __init__(self, cache: KVCache, num_host_blocks: int) -> None:
        self._cache = cache
        self.num_host_blocks = num_host_blocks
        self._dim = cache.block_dim
        shape = list(cache.pool.shape)
        shape[self._dim] = num_host_blocks
        # Page-locked, or the copies of a CUDA device would go through a hidden second buffer.
        self._host = torch.empty(
            shape, dtype=cache.pool.dtype, pin_memory=cache.pool.device.type == "cuda"
        )

        is_cuda = cache.pool.device.type == "cuda"
        self._stream: torch.cuda.Stream | None = None
        if is_cuda:
            self._stream = torch.cuda.Stream(cache.pool.device)  # type: ignore[no-untyped-call]

    def run(self, copies: Sequence[BlockCopy]) -> None:
        """In their order, since a later copy may read or overwrite what an earlier one touched."""
        if self._stream is None or not copies:
            self._run(copies)
            return
        compute = torch.cuda.current_stream(self._cache.pool.device)
        self._stream.wait_stream(compute)
        with torch.cuda.stream(self._stream):
            self._run(copies)
        compute.wait_stream(self._stream)

    def _run(self, copies: Sequence[BlockCopy]) -> None:
        for kind, group in groupby(copies, key=lambda copy: copy.kind):
            source = self._host if kind is CopyKind.IN else self._cache.pool
            target = self._host if kind is CopyKind.OUT else self._cache.pool
            for batch in _independent(group, same_memory=source is target):
                self._copy(source, target, batch)

    def _copy(self, source: Tensor, target: Tensor, copies: list[BlockCopy]) -> None:
        # Of two copies to one place the later one counts.
        source_of = {copy.target: copy.source for copy in copies}
        read = torch.tensor(list(source_of.values()), device=source.device)
        write = torch.tensor(list(source_of), device=target.device)
        if source is target and source_of.keys().isdisjoint(source_of.values()):
            copy_blocks(source, self._dim, read, write)
            return
        blocks = gather_blocks(source, self._dim, read).to(target.device)
        scatter_blocks(target, self._dim, write, blocks)


def _independent(copies: Iterable[BlockCopy], *, same_memory: bool) -> Iterator[list[BlockCopy]]:
    """Batches in which no copy reads what another one writes, as all are read before any write."""
    batch: list[BlockCopy] = []
    written: set[int] = set()
    for copy in copies:
        if same_memory and copy.source in written:
            yield batch
            batch, written = [], set()
        batch.append(copy)
        written.add(copy.target)
    yield batch
