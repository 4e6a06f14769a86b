"""Chooses what a model runs on and in: device, CPU threads, dtypes. Engine thread, at load."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

import torch
from cb_kernels import multiplies_bfloat16, uses_triton

from cb_backend.errors import ConfigError
from cb_backend.runtime.control_groups import control_groups, two_numbers_in

logger = logging.getLogger(__name__)

_GROUP_FILES = (  # of the microseconds to use in a period, and of the period: of version 2, and 1
    ("cpu.max",),
    ("cpu.cfs_quota_us", "cpu.cfs_period_us"),
)


def choose_device(name: str) -> torch.device:
    """The torch device of a config's `device`. Raises ConfigError when it is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(
            f"device must be auto, cpu, cuda or cuda:<index>, got {name!r}", field="device"
        ) from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device must be cpu or cuda, got {name!r}", field="device")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"device {name!r} was asked for, but torch sees {torch.cuda.device_count()} CUDA"
            " devices; use auto or cpu",
            field="device",
        )
    return device


def choose_num_threads(wanted: int | None, groups: Iterable[Path] | None = None) -> int:
    """The CPU threads of a config's `num_threads`; None: as many as torch would take, and no more
    than the process's control groups (`groups`) let run at once: others would stop all when its
    time is used up."""
    if wanted is not None:
        return wanted
    num_threads = torch.get_num_threads()
    allowed = num_threads
    for folder in control_groups("cpu") if groups is None else groups:
        for files in _GROUP_FILES:
            if (numbers := two_numbers_in(folder, *files)) is not None:
                quota, period = numbers
                if quota > 0 and period > 0:  # -1 of version 1: no limit
                    allowed = min(allowed, max(1, quota // period))
    if allowed < num_threads:
        logger.info("CPU threads: %d, the container's limit", allowed)
    return allowed


def choose_dtype(name: str, stored: torch.dtype | None, device: torch.device) -> torch.dtype:
    """The dtype of a config's `dtype`; auto is what the weights are stored in, if it is fast."""
    if name != "auto":
        dtype: torch.dtype = getattr(torch, name)
        return dtype
    dtype = stored or torch.float32
    if device.type == "cpu" and dtype != torch.float32 and not _cpu_is_fast_in(dtype):
        logger.info("dtype: float32, since this CPU has no fast %s", dtype)
        return torch.float32
    logger.info("dtype: %s", dtype)
    return dtype


def choose_cache_dtype(name: str, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype of K and V for a config's `kv_cache_dtype`. Raises ConfigError where a device has
    no kernels for it."""
    if name == "auto":
        return dtype
    if not uses_triton(torch.empty(0, device=device)):
        reason = f"the device is {device}"
    elif device.type == "cuda" and torch.cuda.get_device_capability(device) < (9, 0):
        reason = f"{torch.cuda.get_device_name(device)} is older"
    else:
        return torch.float8_e4m3fn
    raise ConfigError(
        f"kv_cache_dtype fp8 needs an NVIDIA GPU of compute capability 9.0 or newer, and {reason};"
        " use auto",
        field="kv_cache_dtype",
    )


def _cpu_is_fast_in(dtype: torch.dtype) -> bool:
    features = torch.cpu.get_capabilities()
    if dtype == torch.bfloat16:
        return multiplies_bfloat16() or any(
            features.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16")
        )
    return dtype == torch.float16 and bool(features.get("amx_fp16"))
