"""The launches of a mixture of experts that the compile gate makes. Qwen3 30B-A3B's sizes."""

from __future__ import annotations

import torch
from cb_kernels import route
from cb_kernels.triton.experts import multiply_pairs, sum_pairs
from cb_kernels.triton.launch import chip
from cb_kernels.triton.routing import Tiles, group_pairs
from cb_kernels.triton.table import options
from torch import Tensor

HIDDEN, INNER, NUM_EXPERTS, TOP_K = 2048, 768, 128, 8
TOKENS = 256


def products(shape_class: str, dtype: torch.dtype = torch.bfloat16) -> None:
    """Of gate and up, whose rows are tokens, and of down, whose rows are pairs."""
    x, inner = _meta(TOKENS, HIDDEN, dtype=dtype), _meta(TOKENS * TOP_K, INNER, dtype=dtype)
    config = options("multiply_pairs", shape_class, chip(x))
    num_tiles = NUM_EXPERTS + TOKENS * TOP_K // config["BLOCK_M"]
    tiles = Tiles(
        experts=_meta(num_tiles, dtype=torch.int32),
        pairs=_meta(num_tiles, config["BLOCK_M"], dtype=torch.int32),
        num_pairs=TOKENS * TOP_K,
    )
    multiply_pairs(x, _meta(NUM_EXPERTS, 2 * INNER, HIDDEN, dtype=dtype), tiles, config)
    down = _meta(NUM_EXPERTS, HIDDEN, INNER, dtype=dtype)
    factors = _meta(TOKENS, TOP_K, dtype=torch.float32)
    multiply_pairs(inner, down, tiles, config, factors=factors)


def choose(num_experts: int, top_k: int, dtype: torch.dtype = torch.bfloat16) -> None:
    _, chosen = route(_meta(TOKENS, num_experts, dtype=dtype), top_k, normalize=True)
    group_pairs(chosen, num_experts, 16)


def add() -> None:
    sum_pairs(_meta(TOKENS * TOP_K, HIDDEN), TOKENS)


def _meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
