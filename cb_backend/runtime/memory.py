"""How much memory is free for the KV cache on a device. Engine thread, at load."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from pathlib import Path

import torch

from cb_backend.errors import ConfigError
from cb_backend.runtime.control_groups import control_groups, two_numbers_in

# Of a limit, above which a group waits for memory or is killed, of what is used of it, and what of
# memory.stat the system takes back before that: files that were read and nobody uses. Of version 2,
# and 1.
_GROUP_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.high", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
_MEMINFO = Path("/proc/meminfo")


def available_bytes(device: torch.device, memory_fraction: float) -> int:
    """Bytes the KV pool may take: on CUDA up to `memory_fraction` of the whole device, counting
    what the weights took; on the CPU what the machine and its container have left."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return max(0, free - int(total * (1.0 - memory_fraction)))
    return host_available_bytes(_MEMINFO, control_groups("memory"))


def host_available_bytes(meminfo: Path, groups: Iterable[Path]) -> int:
    """MemAvailable, or what is left of a control group's limit where that is less: as Kubernetes
    counts it, without files that were read, the weights' among them."""
    available = _mem_available(meminfo)
    for folder in groups:
        for limit_file, used_file, of_files in _GROUP_FILES:
            if (numbers := two_numbers_in(folder, limit_file, used_file)) is not None:
                limit, used = numbers
                unused = min(used, _statistic(folder / "memory.stat", of_files))
                available = min(available, limit - used + unused)
    return max(0, available)


def give_back_free_memory() -> None:
    """What was freed on the host goes back to the system, where the C library can (glibc): it keeps
    the holes that loading leaves, a tenth of the weights."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _statistic(file: Path, name: str) -> int:
    """0 where it is not told."""
    try:
        values = dict(line.split() for line in file.read_text().splitlines())
        return int(values.get(name, 0))
    except (OSError, ValueError):
        return 0


def _mem_available(meminfo: Path) -> int:
    try:
        lines = meminfo.read_text().splitlines()
        values = dict(line.split(":", 1) for line in lines if ":" in line)
        return int(values["MemAvailable"].split()[0]) * 1024
    except (OSError, LookupError, ValueError) as error:
        raise ConfigError(
            f"cannot tell the free memory from {meminfo}; set kv_cache_gib or num_kv_blocks",
            field="kv_cache_gib",
        ) from error
