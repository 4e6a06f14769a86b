"""The launches that the compile gate makes: every row of the launch table, as models would use it.

A case calls the public operations on tensors that have no memory. Sizes are those of real models,
since what the JIT knows of them (divisible by 16, say) decides what it compiles.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from cb_kernels import add_rms_norm, rms_norm
from cb_kernels.triton.chips import CHIPS
from cb_kernels.triton.launch import Compilation, compile_only
from torch import Tensor

ALL_CHIPS = tuple(CHIPS)


@dataclass(frozen=True, slots=True)
class Case:
    """`wide`: none of its loads of global memory takes less than 4 bytes, and some take 16.
    `wgmma`: it multiplies matrices with warp groups on sm_90."""

    name: str
    run: Callable[[], object]
    chips: tuple[str, ...] = ALL_CHIPS
    wide: bool = False
    wgmma: bool = False


@functools.cache
def compiled(case: Case, chip: str) -> Compilation:
    with compile_only(CHIPS[chip]) as compilation:
        case.run()
    return compilation


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _norm_cases() -> list[Case]:
    def norm(width: int) -> None:
        rms_norm(tensor(64, width), tensor(width), 1e-5)

    def add(width: int) -> None:
        add_rms_norm(tensor(64, width), tensor(64, width), tensor(width), 1e-5)

    return [
        Case("rms_norm 128", lambda: norm(128)),  # the weight alone is narrow: 2 bytes a thread
        Case(
            "rms_norm heads of 128",
            lambda: rms_norm(tensor(64, 48, 128)[:, :40], tensor(128), 1e-5),
        ),
        *(
            Case(f"rms_norm {width}", partial(norm, width), wide=True)
            for width in (576, 1024, 4096, 5120, 16384)
        ),
        Case(
            "rms_norm 4096 float32 weight",
            lambda: rms_norm(tensor(64, 4096), tensor(4096, dtype=torch.float32), 1e-5),
            wide=True,
        ),
        *(
            Case(f"add_rms_norm {width}", partial(add, width), wide=True)
            for width in (1024, 4096, 8192)
        ),
    ]


CASES = [*_norm_cases()]
