"""KV blocks in a file, so that a prefix cache outlives its process. Engine thread, start and end.

A file belongs to one model, its weights and one layout: any other is passed over.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from cb_kernels import gather_blocks, scatter_blocks
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from cb_backend.runtime.kv_cache import KVCache

_FORMAT = "cb_backend KV blocks 1"
_DIGEST_BYTES = 32
_SAMPLES, _SAMPLE_BYTES = 64, 4096  # of each weights file


def fingerprint(folder: Path, cache: KVCache, way: str) -> str:
    """Of model, weights, layout, and the way in which K and V are computed: others round otherwise.

    Reads samples of the weights: all of them would take minutes. A fine-tuned model differs nearly
    everywhere, so 64 samples of 4 KiB tell it apart.
    """
    shape = list(cache.pool.shape)
    shape[cache.block_dim] = -1
    layout = f"{shape} {cache.pool.dtype} {'paired' if cache.is_paired else 'plain'}"
    digest = hashlib.sha256(f"{_FORMAT} {layout} {way}".encode())
    digest.update((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for sample in range(_SAMPLES):
                file.seek(sample * max(size - _SAMPLE_BYTES, 0) // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def save_blocks(path: Path, key: str, blocks: Mapping[bytes, int], cache: KVCache) -> None:
    """Write these device blocks with their digests. Raises OSError; the old file then stays."""
    index = torch.tensor(list(blocks.values()), dtype=torch.int64, device=cache.pool.device)
    tensors = {
        "digests": torch.tensor(list(b"".join(blocks)), dtype=torch.uint8),
        "blocks": gather_blocks(cache.pool, cache.block_dim, index).cpu(),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        save_file(tensors, unfinished, metadata={"key": key})
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def digests_in(path: Path, key: str) -> list[bytes]:
    """What the file holds, in its order; nothing if it is absent, broken or another model's."""
    try:
        with safe_open(path, framework="pt") as file:
            if file.metadata().get("key") != key:
                return []
            raw = bytes(file.get_tensor("digests").tolist())
    except (OSError, SafetensorError, AttributeError):
        return []
    return [raw[start : start + _DIGEST_BYTES] for start in range(0, len(raw), _DIGEST_BYTES)]


def load_blocks(path: Path, places: Sequence[tuple[int, int]], cache: KVCache) -> None:
    """Copy blocks of the file, by position, to blocks of the pool: pairs of (position, block)."""
    with safe_open(path, framework="pt") as file:
        blocks: Tensor = file.get_tensor("blocks")
    device = cache.pool.device
    read = torch.tensor([position for position, _ in places])
    write = torch.tensor([block_id for _, block_id in places], device=device)
    chosen = blocks.index_select(cache.block_dim, read).to(device)
    scatter_blocks(cache.pool, cache.block_dim, write, chosen)
