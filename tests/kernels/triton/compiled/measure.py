"""What a compiled kernel costs: of NVIDIA's, the resources of the binary that would run and the
instructions of its PTX (disassembling takes half a second); of AMD's, both from the assembly."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import triton

_CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"

Figures = dict[str, int]


def figures(binary: Any) -> Figures:
    """Registers of a thread and shared bytes of a program; instructions by kind.

    spills: bytes of a thread's stack, or AMD's count of spilled registers. wgmma: Hopper's products
    of warp groups; mma: other products of matrices. wide, middling, narrow: loads of global memory
    by 16 bytes or more, by 4 or 8, and by less; async: those of them that go to shared memory.
    """
    if "cubin" in binary.asm:
        return _of_cuda(binary.asm["cubin"], binary.asm["ptx"], binary.metadata.shared)
    return _of_amdgcn(binary.asm["amdgcn"], binary.metadata.shared)


def _of_cuda(cubin: bytes, ptx: str, shared: int) -> Figures:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [_CUOBJDUMP, "-res-usage", file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return {
        "registers": _number(r"REG:(\d+)", done.stdout),
        "shared": shared,
        "spills": _number(r"STACK:(\d+)", done.stdout),
        "wgmma": len(re.findall(r"\bwgmma\.mma_async", ptx)),
        "mma": len(re.findall(r"\b(?:mma\.sync|tcgen05\.mma)", ptx)),
        "async": len(re.findall(r"\bcp\.async\.c[ag]", ptx)),
        **_by_width([*_ptx_loads(ptx)]),
    }


def _ptx_loads(ptx: str) -> Iterator[int]:
    """The bytes of each load of global memory by a thread."""
    for vector, bits in re.findall(r"\bld\.global(?:\.[a-zA-Z_:0-9]+)*?(\.v\d)?\.[bfus](\d+)", ptx):
        yield int(vector[2:] or 1) * int(bits) // 8
    for size in re.findall(r"\bcp\.async\.c[ag]\S*\s+\[.*?\],\s*\[.*?\],\s*(0x\w+|\d+)", ptx):
        yield int(size, 0)


def _of_amdgcn(assembly: str, shared: int) -> Figures:
    ops = Counter(re.findall(r"^\s+([a-z][a-z0-9_]+)\b", assembly, re.M))
    sizes = {"dwordx4": 16, "dwordx3": 12, "dwordx2": 8, "dword": 4, "ushort": 2, "ubyte": 1}
    loads = []
    for op, count in ops.items():
        if match := re.match(r"(?:global|buffer)_load_(\w+?)(?:_d16(?:_hi)?)?$", op):
            loads += [sizes.get(match[1], 1)] * count
    return {
        "registers": _number(r"\.vgpr_count:\s+(\d+)", assembly),
        "shared": shared,
        "spills": _number(r"\.vgpr_spill_count:\s+(\d+)", assembly),
        "wgmma": 0,
        "mma": sum(count for op, count in ops.items() if op.startswith("v_mfma")),
        "async": 0,
        **_by_width(loads),
    }


def _by_width(loads: list[int]) -> Figures:
    return {
        "wide": sum(size >= 16 for size in loads),
        "middling": sum(4 <= size < 16 for size in loads),
        "narrow": sum(size < 4 for size in loads),
    }


def _number(pattern: str, text: str) -> int:
    match = re.search(pattern, text)
    assert match is not None, pattern
    return int(match[1])
