"""Sizes and allocates the pool of KV blocks. Engine thread, once, after the weights."""

from __future__ import annotations

import logging
import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from cb_kernels import PairedCaches, can_pair, paired_views, uses_triton
from torch import Tensor

from cb_backend.config import EngineConfig
from cb_backend.errors import ConfigError
from cb_backend.runtime.memory import available_bytes
from cb_backend.runtime.models.interface import ModelGeometry

logger = logging.getLogger(__name__)

_GIB = 2**30

# Larger blocks gather faster and waste more of a row's last block; the CPU is slow at gathering.
_BLOCK_SIZE = {"cpu": 32, "cuda": 16}

# On the CPU the pool shares memory with everything else, so the default leaves most of it.
_CPU_MOST_BYTES = 4 * _GIB
_CPU_SHARE = 0.25

_PIECE = 2**20  # bytes of a pool that are touched at once: a millisecond, or four on a slow host


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """What the pool holds."""

    num_blocks: int
    block_size: int  # tokens
    bytes_per_block: int  # K and V of all layers
    max_model_len: int  # tokens


class KVCache:
    """K and V of every layer in one allocation, cut into blocks of tokens.

    Where the kernels in C take it, it is paired, and [N, L, 2, H_kv, block_size, D]: all of a block
    lies together, in few pages, and memory is taken block by block. Elsewhere on a CPU it is
    [L, 2, H_kv, N, block_size, D]: gathering a head's blocks yields what a matrix product wants.
    On other devices [L, 2, N, block_size, H_kv, D].
    """

    def __init__(
        self,
        geometry: ModelGeometry,
        num_blocks: int,
        block_size: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        on_cpu = device.type == "cpu"
        self._device, self._dtype = device, dtype
        self.block_size = block_size
        self.is_paired = (
            on_cpu
            and not uses_triton(torch.empty(0, device=device))
            and can_pair(
                dtype,
                block_size=block_size,
                head_dim=geometry.head_dim,
                group=geometry.num_heads // geometry.num_kv_heads,
            )
        )
        layers, heads, dim = geometry.num_layers, geometry.num_kv_heads, geometry.head_dim
        if self.is_paired:
            self.block_dim, shape = 0, (num_blocks, layers, 2, heads, block_size, dim)
        elif on_cpu:
            self.block_dim, shape = 3, (layers, 2, heads, num_blocks, block_size, dim)
        else:
            self.block_dim, shape = 2, (layers, 2, num_blocks, block_size, heads, dim)
        self.pool = self._allocate(shape)
        self._num_touched = 0  # bytes, from the pool's start
        # By which float8 numbers are multiplied when they are read, of each head of K and of V. 1,
        # for want of a calibration; what is past 448 becomes 448.
        self.scales: tuple[Tensor, Tensor] | None = None
        if dtype == torch.float8_e4m3fn:
            ones = torch.ones(geometry.num_kv_heads, device=device)
            self.scales = (ones, ones)
        self.layers = self._layers()
        # The same for a whole decoder in one call; None: it cannot be had.
        self.paired = PairedCaches(self.layers) if self.is_paired else None

    def clear(self, block_ids: Sequence[int]) -> None:
        """Zero blocks before their new owner writes them.

        Masked positions still meet a weight of zero, and zero times an earlier owner's NaN is NaN;
        not so where the kernels read no slot that its row has not written, those in C of a paired
        cache and those in Triton.
        """
        index = torch.tensor(block_ids, dtype=torch.int64, device=self.pool.device)
        self.pool.index_fill_(self.block_dim, index, 0)

    @property
    def num_untouched_bytes(self) -> int:
        """Of a pool on the CPU: what the system has yet to find memory for, as far as is known."""
        return self.pool.nbytes - self._num_touched if self._device.type == "cpu" else 0

    def touch_more(self) -> None:
        """Have the system find memory for the next piece of a pool on the CPU, whose contents stay.

        A step that is the first to write to it would wait for that instead: up to four seconds a
        GiB under a hypervisor that has to ask its host.
        """
        piece = self.pool.view(-1).view(torch.uint8)[self._num_touched :][:_PIECE]
        piece[:: mmap.PAGESIZE].bitwise_or_(0)
        self._num_touched += piece.nbytes

    def resize(self, num_blocks: int) -> None:
        """Keep the first `num_blocks` blocks, or add as many as are missing.

        Goes through host memory: the device never holds the old pool and the new one at once,
        since this is called when its memory is short.
        """
        num_kept = min(num_blocks, self.pool.shape[self.block_dim])
        kept = self.pool.narrow(self.block_dim, 0, num_kept).to("cpu", copy=True)
        shape = list(self.pool.shape)
        shape[self.block_dim] = num_blocks
        del self.pool, self.layers, self.paired
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        self.pool = self._allocate(shape)
        self._num_touched = 0
        self.pool.narrow(self.block_dim, 0, num_kept).copy_(kept)
        self.layers = self._layers()
        self.paired = PairedCaches(self.layers) if self.is_paired else None

    def _allocate(self, shape: Sequence[int]) -> Tensor:
        """Not zeroed: see `clear`. On the CPU memory is taken as it is touched."""
        if not self.is_paired:
            return torch.empty(shape, dtype=self._dtype, device=self._device)
        num_bytes = math.prod(shape) * self._dtype.itemsize
        memory = torch.empty(num_bytes + mmap.PAGESIZE, dtype=torch.uint8)
        first = -memory.data_ptr() % mmap.PAGESIZE
        return memory[first : first + num_bytes].view(self._dtype).view(shape)

    def _layers(self) -> list[tuple[Tensor, Tensor]]:
        """K and V of each layer as [N, block_size, H_kv, D] or the views of a paired cache."""
        if self.is_paired:
            by_layer = self.pool.flatten(-2).permute(1, 2, 3, 0, 4)  # [L, 2, H_kv, N, ...]
            return [paired_views(k, v, self.block_size) for k, v in by_layer]
        heads_outside = self.block_dim == 3
        return [(_logical(k, heads_outside), _logical(v, heads_outside)) for k, v in self.pool]


def size_kv_cache(
    config: EngineConfig, geometry: ModelGeometry, *, dtype: torch.dtype, device: torch.device
) -> KVCacheSpec:
    """How many blocks there will be, and how long a sequence they and the model can hold.

    Raises ConfigError when max_model_len was asked to be more than that.
    """
    block_size = config.block_size or _BLOCK_SIZE[device.type]
    token_bytes = 2 * geometry.num_layers * geometry.num_kv_heads * geometry.head_dim
    bytes_per_block = block_size * token_bytes * dtype.itemsize
    _check_context(config.max_model_len, geometry.max_context)
    wanted_len = config.max_model_len or geometry.max_context
    num_blocks = config.num_kv_blocks
    if num_blocks is None:
        num_blocks = _pool_bytes(config, device) // bytes_per_block
        # Twice what running requests can ever use leaves as much again for cached prefixes.
        num_blocks = min(num_blocks, 2 * config.max_num_seqs * -(-wanted_len // block_size))
    max_model_len = min(wanted_len, num_blocks * block_size)
    if config.max_model_len is not None and max_model_len < config.max_model_len:
        raise ConfigError(
            f"max_model_len {config.max_model_len} needs {-(-wanted_len // block_size)} KV blocks"
            f" of {block_size} tokens, but {num_blocks} fit; lower max_model_len or raise"
            " kv_cache_gib, num_kv_blocks or memory_fraction",
            field="max_model_len",
        )
    if max_model_len < 1:
        raise ConfigError(
            f"no KV block of {bytes_per_block} bytes fits into the"
            f" {_pool_bytes(config, device)} bytes there are for the cache; lower block_size or"
            " raise kv_cache_gib",
            field="kv_cache_gib",
        )
    logger.info(
        "KV cache: %d blocks of %d tokens, %.2f GiB; max_model_len %d",
        num_blocks,
        block_size,
        num_blocks * bytes_per_block / _GIB,
        max_model_len,
    )
    return KVCacheSpec(num_blocks, block_size, bytes_per_block, max_model_len)


def _check_context(max_model_len: int | None, max_context: int) -> None:
    if max_model_len is not None and max_model_len > max_context:
        raise ConfigError(
            f"max_model_len {max_model_len} is more than the model's context of {max_context}"
            f" tokens; set it to at most {max_context}",
            field="max_model_len",
        )


def _pool_bytes(config: EngineConfig, device: torch.device) -> int:
    if config.kv_cache_gib is not None:
        return int(config.kv_cache_gib * _GIB)
    available = available_bytes(device, config.memory_fraction)
    if device.type == "cpu":
        return min(_CPU_MOST_BYTES, int(available * _CPU_SHARE))
    return available


def _logical(cache: Tensor, heads_outside: bool) -> Tensor:
    return cache.permute(1, 2, 0, 3) if heads_outside else cache
