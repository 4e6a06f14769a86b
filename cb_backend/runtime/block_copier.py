"""Moves whole KV blocks: to another block, to the host tier, and back. Engine thread.

The pool is read and written on the computing stream alone, at the speed of the device's memory: so
copies, forward passes and whoever gets a block next are in the order in which they were asked for.
Only the way between a staging buffer and the host has streams of its own. Blocks leave while the
model computes, and come in while it still computes the step before; what waits is only who needs
the same block of the host.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

import numpy as np
import torch
from cb_kernels import copy_blocks, gather_blocks, scatter_blocks
from torch import Tensor

from cb_backend.core.step_io import BlockCopy, CopyKind
from cb_backend.runtime.kv_cache import KVCache
from cb_backend.runtime.streams import Event, Streams


class BlockCopier:
    """Owns the host tier's memory: `num_host_blocks` blocks, each contiguous."""

    def __init__(self, cache: KVCache, streams: Streams, num_host_blocks: int) -> None:
        self._cache = cache
        self._streams = streams
        self.num_host_blocks = num_host_blocks
        self._dim = cache.block_dim
        shape = list(cache.pool.shape)
        del shape[self._dim]
        dtype = cache.pool.dtype
        memory = streams.host_memory(num_host_blocks * torch.Size(shape).numel() * dtype.itemsize)
        self._host = memory.view(dtype).view(num_host_blocks, *shape)
        self._written: dict[int, Event] = {}  # when a block of the host last was

    def run(self, copies: Sequence[BlockCopy]) -> None:
        """In their order, since a later copy may read or overwrite what an earlier one touched."""
        for kind, group in groupby(copies, key=lambda copy: copy.kind):
            for batch in _independent(group, same_memory=kind is CopyKind.FORK):
                # Of two copies to one place the later one counts.
                source_of = {copy.target: copy.source for copy in batch}
                targets, sources = list(source_of), list(source_of.values())
                if kind is CopyKind.FORK:
                    self._fork(sources, targets)
                elif kind is CopyKind.OUT:
                    self._out(sources, targets)
                else:
                    self._in(sources, targets)

    def _fork(self, sources: list[int], targets: list[int]) -> None:
        read, write = self._ids(sources), self._ids(targets)
        if set(sources).isdisjoint(targets):
            self._streams.compute.enqueue(
                lambda: copy_blocks(self._cache.pool, self._dim, read, write)
            )
        else:
            self._streams.compute.enqueue(lambda: self._put(write, self._take(read)))

    def _out(self, sources: list[int], targets: list[int]) -> None:
        compute, copy_out = self._streams.compute, self._streams.copy_out
        read = self._ids(sources)
        staged: list[Tensor] = []

        def leave() -> None:
            (blocks,) = staged
            copy_out.uses(blocks)
            for block, target in zip(blocks, targets, strict=True):
                self._host[target].copy_(block, non_blocking=True)

        compute.enqueue(lambda: staged.append(self._take(read).movedim(self._dim, 0).contiguous()))
        # After all that came in before as well, since the computing stream has waited for that: so
        # no block of the host is overwritten that is still being read.
        copy_out.wait(compute.record())
        copy_out.enqueue(leave)
        self._written |= dict.fromkeys(targets, copy_out.record())

    def _in(self, sources: list[int], targets: list[int]) -> None:
        compute, copy_in = self._streams.compute, self._streams.copy_in
        write = self._ids(targets)
        staged: list[Tensor] = []

        def come() -> None:
            shape = (len(sources), *self._host.shape[1:])
            blocks = torch.empty(shape, dtype=self._host.dtype, device=self._cache.pool.device)
            for block, source in zip(blocks, sources, strict=True):
                block.copy_(self._host[source], non_blocking=True)
            staged.append(blocks)

        def settle() -> None:
            (blocks,) = staged
            compute.uses(blocks)
            self._put(write, blocks.movedim(0, self._dim).contiguous())

        written = [self._written[source] for source in sources if source in self._written]
        for event in dict.fromkeys(written):
            copy_in.wait(event)
        copy_in.enqueue(come)
        compute.wait(copy_in.record())
        compute.enqueue(settle)

    def _ids(self, block_ids: list[int]) -> Tensor:
        return self._streams.upload({"ids": np.array(block_ids)})["ids"]

    def _take(self, block_ids: Tensor) -> Tensor:
        return gather_blocks(self._cache.pool, self._dim, block_ids)

    def _put(self, block_ids: Tensor, blocks: Tensor) -> None:
        scatter_blocks(self._cache.pool, self._dim, block_ids, blocks)


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
