"""The launch table: tiles, warps and stages by kernel, shape class and chip.

Filled from what compiles without spills for each chip. There is no tuning at run time. A launcher
names the shape class; the compile gate compiles every row.
"""

from __future__ import annotations

from collections.abc import Mapping

from cb_kernels.triton.chips import Chip

Options = dict[str, int]  # keyword arguments of a launch
Rows = Mapping[str, Mapping[str, Options]]  # shape class -> chip's name, or ANY -> options

ANY = "any"


def _attend(
    block_m: int, block_n: int, num_warps: int, num_stages: int, *, phases: bool = False
) -> Options:
    return {
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "PHASES": phases,
        "num_warps": num_warps,
        "num_stages": num_stages,
    }


def _multiply(block_m: int, block_n: int, block_k: int, num_warps: int, num_stages: int) -> Options:
    return {
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "BLOCK_K": block_k,
        "num_warps": num_warps,
        "num_stages": num_stages,
    }


# One program takes a whole row, of up to WIDEST elements; narrow rows share a program.
WIDEST = 16384
_ROW_KERNEL: Rows = {
    "head": {ANY: {"ROWS": 16, "num_warps": 4, "num_stages": 1}},  # up to 256 wide
    "narrow": {ANY: {"ROWS": 1, "num_warps": 2, "num_stages": 1}},  # 1024
    "middle": {ANY: {"ROWS": 1, "num_warps": 8, "num_stages": 1}},  # 4096
    "wide": {ANY: {"ROWS": 1, "num_warps": 16, "num_stages": 1}},
}

# Paged attention by kind and padded head dimension; kinds are chosen in `attention_plan`.
# decode: few queries a row, so a tile of 16, and two tiles of K and V on their way while one is
# used. chunk: 64 rows and more, which Hopper and Blackwell multiply by warp groups. fixed: like
# chunk, with the sums of a part beside those of all, so half the registers are left (and with 256
# dimensions only 32 rows). float32: products without tensor cores.
_ATTEND: Rows = {
    "decode 64": {ANY: _attend(16, 64, 4, 3)},
    "decode 128": {ANY: _attend(16, 64, 4, 3), "gfx942": _attend(16, 32, 4, 3)},
    "decode 256": {ANY: _attend(16, 32, 4, 3), "gfx942": _attend(16, 32, 4, 2)},
    "chunk 64": {ANY: _attend(128, 64, 8, 2, phases=True)},
    "chunk 128": {
        ANY: _attend(128, 64, 8, 2, phases=True),
        "sm_80": _attend(64, 32, 4, 2, phases=True),
        "gfx942": _attend(64, 32, 4, 2, phases=True),
    },
    "chunk 256": {
        ANY: _attend(64, 32, 8, 2, phases=True),
        "gfx942": _attend(64, 16, 8, 2, phases=True),
    },
    "fixed 64": {ANY: _attend(64, 64, 8, 2)},
    "fixed 128": {
        ANY: _attend(64, 64, 8, 2),
        "sm_80": _attend(64, 32, 8, 2),
        "gfx942": _attend(64, 32, 8, 2),
    },
    "fixed 256": {ANY: _attend(32, 32, 8, 2)},
    "float32 64": {ANY: _attend(16, 32, 4, 2)},
    "float32 128": {ANY: _attend(16, 16, 4, 2)},
    "float32 256": {ANY: _attend(16, 16, 4, 2)},
}

_COMBINE: Rows = {
    "by tiles": {ANY: {"ROWS": 4, "PARTS": 8, "num_warps": 4, "num_stages": 1}},
    "in order": {ANY: {"ROWS": 16, "PARTS": 1, "num_warps": 4, "num_stages": 1}},
}

# Of linear layers whose tiles are the same for one row and for thousands. Narrow ones: a decoding
# step has few tiles of rows, so those of the weight must be many to keep all processors reading.
_LINEAR: Rows = {
    "half": {
        ANY: _multiply(64, 64, 64, 4, 4),
        "gfx942": _multiply(64, 64, 64, 4, 2),
    },
    "float32": {ANY: _multiply(32, 32, 32, 4, 2)},  # products without tensor cores
}

# Of a mixture of experts, by the pairs that an expert has. few: a decoding step, where what counts
# is that many programs read weights. many, most: tiles that Hopper and Blackwell multiply by warp
# groups. fixed: for any number, as in `linear`.
_EXPERTS: Rows = {
    "few": {
        ANY: _multiply(16, 64, 128, 4, 4),
        "gfx942": _multiply(16, 64, 128, 4, 2),
    },
    "many": {
        ANY: _multiply(64, 128, 64, 4, 4),
        "gfx942": _multiply(64, 128, 64, 4, 2),
    },
    "most": {
        ANY: _multiply(128, 256, 64, 8, 3),
        "sm_80": _multiply(128, 128, 64, 8, 3),  # twice as wide it spills
        "gfx942": _multiply(128, 128, 64, 8, 2),
    },
    "fixed": {
        ANY: _multiply(64, 64, 64, 4, 4),
        "gfx942": _multiply(64, 64, 64, 4, 2),
    },
    "float32": {ANY: _multiply(32, 32, 32, 4, 2)},  # without tensor cores
}

TABLE: dict[str, Rows] = {
    "attend": _ATTEND,
    "combine": _COMBINE,
    "rms_norm": _ROW_KERNEL,
    # By the width of the result. A thread should have 8 elements or more: 16 bytes a load.
    "gated": {
        "narrow": {  # up to 1024
            ANY: {"BLOCK": 1024, "num_warps": 4, "num_stages": 1},
            "gfx942": {"BLOCK": 1024, "num_warps": 2, "num_stages": 1},
        },
        "wide": {
            ANY: {"BLOCK": 2048, "num_warps": 8, "num_stages": 1},
            "gfx942": {"BLOCK": 2048, "num_warps": 4, "num_stages": 1},
        },
    },
    "store_kv": {
        "any": {
            ANY: {"ROWS": 8, "num_warps": 4, "num_stages": 1},
            "gfx942": {"ROWS": 16, "num_warps": 4, "num_stages": 1},
        }
    },
    "store_heads": {
        "any": {
            ANY: {"ROWS": 8, "num_warps": 4, "num_stages": 1},  # 16: Triton 3.6 spills for sm_90
            "gfx942": {"ROWS": 16, "num_warps": 4, "num_stages": 1},
        }
    },
    "edit_logits": {"any": {ANY: {"BLOCK": 2048, "num_warps": 8, "num_stages": 1}}},
    "sample": {"any": {ANY: {"BLOCK": 2048, "PIVOTS": 4, "num_warps": 16, "num_stages": 1}}},
    "linear": _LINEAR,
    "route": {"any": {ANY: {"ROWS": 4, "num_warps": 4, "num_stages": 1}}},
    "group_pairs": {"any": {ANY: {"BLOCK": 2048, "num_warps": 8, "num_stages": 1}}},
    "multiply_pairs": _EXPERTS,
    "sum_pairs": {
        "any": {
            ANY: {"BLOCK": 1024, "num_warps": 4, "num_stages": 1},
            "gfx942": {"BLOCK": 1024, "num_warps": 2, "num_stages": 1},
        }
    },
    "copy_blocks": {"any": {ANY: {"BLOCK": 4096, "num_warps": 8, "num_stages": 1}}},
}


def options(kernel: str, shape_class: str, chip: Chip) -> Options:
    """A row of the table, as keyword arguments for `launch`."""
    rows = TABLE[kernel][shape_class]
    return rows.get(chip.name) or rows[ANY]


def width_class(width: int) -> str:
    """The shape class of rows of `width` elements. Raises ValueError past WIDEST."""
    if width > WIDEST:
        raise ValueError(f"rows of {width} elements are wider than the {WIDEST} a program takes")
    if width <= 256:
        return "head"
    return "narrow" if width <= 1024 else "middle" if width <= 4096 else "wide"
