"""Which experts a token takes, and which pairs an expert gets: tiles of pairs, one expert's each.

Only what is in the tiles depends on numbers that the device alone knows: there are as many as any
choice of experts could need, and some have no expert.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from cb_kernels.triton.launch import chip, launch
from cb_kernels.triton.table import options


@dataclass(frozen=True, slots=True)
class Tiles:
    """Pairs sorted by expert, each expert's in tiles of its own."""

    experts: Tensor  # [tiles], int32; -1 for a tile that nobody needs
    pairs: Tensor  # [tiles, pairs of a tile], int32, ascending; where there is none, `num_pairs`
    num_pairs: int


def route(logits: Tensor, top_k: int, *, normalize: bool) -> tuple[Tensor, Tensor]:
    """See `experts.route`."""
    num_rows, num_experts = logits.shape
    weights = torch.empty(num_rows, top_k, dtype=torch.float32, device=logits.device)
    chosen = torch.empty(num_rows, top_k, dtype=torch.int32, device=logits.device)
    config = options("route", "any", chip(logits))
    launch(
        _route,
        (triton.cdiv(num_rows, config["ROWS"]),),
        *(logits.contiguous(), weights, chosen, num_rows),
        EXPERTS=num_experts,
        EXPERTS_PAD=triton.next_power_of_2(num_experts),
        TOP_K=top_k,
        TOP_K_PAD=triton.next_power_of_2(top_k),
        NORMALIZE=normalize,
        **config,
    )
    return weights, chosen


def group_pairs(chosen: Tensor, num_experts: int, tile: int) -> Tiles:
    """The pairs of chosen [T, top_k] in tiles of `tile`; an expert's last may not be full."""
    num_pairs = chosen.numel()
    num_tiles = min(num_pairs, num_pairs // tile + num_experts)
    experts = torch.empty(num_tiles, dtype=torch.int32, device=chosen.device)
    pairs = torch.empty(num_tiles, tile, dtype=torch.int32, device=chosen.device)
    config = options("group_pairs", "any", chip(chosen))
    launch(
        _group_pairs,
        (num_experts if num_pairs else 0,),
        *(chosen, experts, pairs, num_pairs),
        TILE=tile,
        **config,
    )
    return Tiles(experts, pairs, num_pairs)


# One row is compiled like many, here and below: their number must not choose the code.
@triton.jit(do_not_specialize=["num_rows"])
def _route(
    logit_ptr,  # [num_rows, EXPERTS]
    weight_ptr,  # [num_rows, TOP_K]
    chosen_ptr,  # [num_rows, TOP_K]
    num_rows,
    EXPERTS: tl.constexpr,
    EXPERTS_PAD: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_K_PAD: tl.constexpr,
    NORMALIZE: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    expert = tl.arange(0, EXPERTS_PAD)[None, :]
    inside = (row < num_rows) & (expert < EXPERTS)
    logits = tl.load(logit_ptr + row * EXPERTS + expert, mask=inside, other=0.0).to(tl.float32)
    logits = tl.where(expert < EXPERTS, logits, float("-inf"))
    weights = tl.exp(logits - tl.max(logits, 1)[:, None])
    weights = weights / tl.sum(weights, 1)[:, None]
    weights = tl.where(expert < EXPERTS, weights, -1.0)
    place = tl.arange(0, TOP_K_PAD)[None, :]
    kept = tl.zeros([ROWS, TOP_K_PAD], tl.float32)
    chosen = tl.zeros([ROWS, TOP_K_PAD], tl.int32)
    for i in range(TOP_K):
        best = tl.max(weights, 1)[:, None]
        # The first of equals. A row of NaN equals nothing, and still names an expert that exists.
        number = tl.min(tl.where(weights == best, expert, EXPERTS - 1), 1)[:, None]
        kept = tl.where(place == i, best, kept)
        chosen = tl.where(place == i, number, chosen)
        weights = tl.where(expert == number, -1.0, weights)
    if NORMALIZE:
        kept = kept / tl.sum(kept, 1)[:, None]
    exists = (row < num_rows) & (place < TOP_K)
    tl.store(weight_ptr + row * TOP_K + place, kept, mask=exists)
    tl.store(chosen_ptr + row * TOP_K + place, chosen, mask=exists)


@triton.jit
def _first_tile(pairs, experts, TILE: tl.constexpr):
    """Of the expert behind so many experts with so many pairs. They need no more tiles than that:
    no more than pairs, and none but each one's last is not full."""
    return tl.minimum(pairs, pairs // TILE + experts)


# A program takes an expert and looks through all pairs, twice: how many are of experts before and
# of its own tells where its tiles begin, so that no program waits for another.
@triton.jit(do_not_specialize=["num_pairs"])
def _group_pairs(
    chosen_ptr,  # [num_pairs]
    expert_ptr,  # [tiles]
    pair_ptr,  # [tiles, TILE]
    num_pairs,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    expert = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    lower = tl.zeros([BLOCK], tl.int32)
    own = tl.zeros([BLOCK], tl.int32)
    for start in range(0, num_pairs, BLOCK):
        exists = start + lane < num_pairs
        chosen = tl.load(chosen_ptr + start + lane, mask=exists, other=0)
        lower += (exists & (chosen < expert)).to(tl.int32)
        own += (exists & (chosen == expert)).to(tl.int32)
    before, count = tl.sum(lower), tl.sum(own)
    first = _first_tile(before, expert, TILE)
    end = first + tl.cdiv(count, TILE)
    following = _first_tile(before + count, expert + 1, TILE)
    for start in range(first, following, BLOCK):
        tile = start + lane
        tl.store(expert_ptr + tile, tl.where(tile < end, expert, -1), mask=tile < following)
    slot = first * TILE
    for start in range(0, num_pairs, BLOCK):
        pair = start + lane
        exists = pair < num_pairs
        chosen = tl.load(chosen_ptr + pair, mask=exists, other=0)
        mine = exists & (chosen == expert)
        ones = mine.to(tl.int32)
        tl.store(pair_ptr + slot + tl.cumsum(ones, 0) - 1, pair, mask=mine)
        slot += tl.sum(ones)
    rest = slot + tl.arange(0, TILE)
    nobody = tl.zeros([TILE], tl.int32) + num_pairs
    tl.store(pair_ptr + rest, nobody, mask=rest < end * TILE)
