"""Logits to tokens, each row with its own parameters and its own random numbers.

A row's random number depends on its request's seed and the token's position alone, so a request
draws the same tokens alone, in a batch, or after preemption. Engine thread.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from cb_kernels import argmax
from torch import Tensor

from cb_backend.runtime.step_inputs import SamplingRows

# Candidates that a nucleus is first looked for in, and how many times more where they are too few.
_FIRST_CANDIDATES = 256
_MORE_CANDIDATES = 16
_LARGEST_BLOCK = 256
_SMALLEST_BLOCK = 16


def sample(logits: Tensor, rows: SamplingRows, *, alone: bool = False) -> tuple[Tensor, Tensor]:
    """Token ids [R] of logits [R, V] on a CPU, and which rows are sound [R].

    A row with a NaN, an infinity, or nothing but minus infinities is not, and its id means nothing.
    `alone`: row by row, since torch may sum one row of a few in another order than one of many.
    """
    if alone:
        each = [sample(logits[i : i + 1], _pick(rows, [i])) for i in range(len(logits))]
        tokens_of_each, sound_of_each = zip(*each, strict=True)
        return torch.cat(tokens_of_each), torch.cat(sound_of_each)
    best, best_logits = argmax(logits)
    sound = torch.from_numpy(np.isfinite(best_logits.numpy()))  # by torch it is five operations
    if not rows.draws:
        return best, sound
    index = (torch.from_numpy(rows.temperature > 0) & sound).nonzero()[:, 0]
    if len(index):
        best[index] = _draw(logits[index], best_logits[index], _pick(rows, index.numpy()))
    return best, sound


def uniforms(
    seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """One number in (0, 1) per (seed, position): two rounds of splitmix64 as a hash."""
    state = _splitmix64(_splitmix64(seeds) ^ positions.astype(np.uint64))
    # 48 bits and a half: never 0 nor 1, also after multiplication with a float64 total.
    return ((state >> np.uint64(16)).astype(np.float64) + 0.5) * 2.0**-48


def _splitmix64(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = x + np.uint64(0x9E3779B97F4A7C15)  # arrays wrap around silently, as meant
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _pick(rows: SamplingRows, chosen: Sequence[int] | npt.NDArray[np.int64]) -> SamplingRows:
    return SamplingRows(
        draws=rows.draws,
        temperature=rows.temperature[chosen],
        top_k=rows.top_k[chosen],
        top_p=rows.top_p[chosen],
        min_p=rows.min_p[chosen],
        seeds=rows.seeds[chosen],
        positions=rows.positions[chosen],
    )


def _draw(logits: Tensor, best_logits: Tensor, rows: SamplingRows) -> Tensor:
    """Token ids [R] drawn from the rows' distributions by inverting their CDF.

    In the order temperature, top_k, top_p, min_p; top_p counts what top_k left as the whole.
    """
    device = logits.device
    temperature = torch.from_numpy(rows.temperature).to(device)
    # Relative to the row's largest, which becomes 1: no overflow at any temperature.
    weights = torch.sub(logits, best_logits[:, None])  # [R, V], float32 like best_logits
    weights.div_(temperature[:, None]).exp_()
    min_p = torch.from_numpy(rows.min_p).to(device)
    likely = weights
    if rows.min_p.any():
        likely = torch.where(weights < min_p[:, None], 0.0, weights)
    numbers = torch.from_numpy(uniforms(rows.seeds, rows.positions)).to(device)
    tokens = torch.empty(weights.shape[0], dtype=torch.int64, device=device)
    sorts = (rows.top_k > 0) & (rows.top_k < logits.shape[1]) | (rows.top_p < 1.0)
    plain = torch.from_numpy(np.flatnonzero(~sorts)).to(device)
    if len(plain):
        tokens[plain] = _invert(likely[plain], numbers[plain])
    if sorts.any():
        chosen = np.flatnonzero(sorts)
        index = torch.from_numpy(chosen).to(device)
        tokens[index] = _draw_sorted(
            weights[index],
            torch.from_numpy(rows.top_k[chosen]).to(device),
            torch.from_numpy(rows.top_p[chosen]).to(device),
            min_p[index],
            numbers[index],
        )
    return tokens


def _draw_sorted(
    weights: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    numbers: Tensor,
    num_candidates: int = _FIRST_CANDIDATES,
) -> Tensor:
    """Like `_draw` for rows that look at their candidates from the most likely down.

    How many candidates a row sorts depends on that row alone: equal weights come in an order that
    depends on the count, and a row must draw the same whatever shares its batch.
    """
    vocab_size = weights.shape[1]
    count = min(num_candidates, vocab_size)
    limits = torch.where(top_k > 0, top_k, vocab_size)  # candidates that top_k leaves
    sorted_weights, candidates = weights.topk(count, -1)
    totals = weights.sum(-1, dtype=torch.float64)
    kept, enough = _nucleus(sorted_weights, limits, top_p, totals, vocab_size)
    kept &= sorted_weights >= min_p[:, None]
    drawn = _invert(torch.where(kept, sorted_weights, 0.0), numbers)
    tokens = candidates.gather(1, drawn[:, None])[:, 0]
    if count < vocab_size and not bool(enough.all()):
        rest = (~enough).nonzero()[:, 0]
        tokens[rest] = _draw_sorted(
            weights[rest],
            top_k[rest],
            top_p[rest],
            min_p[rest],
            numbers[rest],
            num_candidates * _MORE_CANDIDATES,
        )
    return tokens


def _nucleus(
    sorted_weights: Tensor, limits: Tensor, top_p: Tensor, totals: Tensor, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """Which sorted candidates [R, K] stay, and for which rows [R] K were enough to tell."""
    count = sorted_weights.shape[1]
    in_top_k = torch.arange(count, device=limits.device) < limits[:, None]
    sums = torch.where(in_top_k, sorted_weights, 0.0).cumsum(-1, dtype=torch.float64)
    limited = limits <= count
    goals = top_p.double() * torch.where(limited, sums[:, -1], totals)
    before = torch.cat((torch.zeros_like(sums[:, :1]), sums[:, :-1]), -1)
    kept = in_top_k & ((before < goals[:, None]) | (top_p >= 1.0)[:, None])
    kept[:, 0] = True  # a top_p too small for a float32 is 0 here, and keeps the first as well
    # A top_k beyond the candidates changes what top_p counts as the whole.
    return kept, limited | ((limits >= vocab_size) & (top_p < 1.0) & (sums[:, -1] >= goals))


def _invert(weights: Tensor, numbers: Tensor) -> Tensor:
    """The first index [R] where the running sum of weights [R, K] passes number * total.

    By blocks, then inside one: a running sum over a whole vocabulary cannot be vectorised.
    """
    block = _block_size(weights.shape[1])
    if block < _SMALLEST_BLOCK:
        return _first_past(weights.cumsum(-1, dtype=torch.float64), numbers)[0]
    blocks = weights.view(weights.shape[0], -1, block)
    sums = blocks.sum(-1, dtype=torch.float64).cumsum(-1)  # [R, K / block]
    chosen, rest = _first_past(sums, numbers)
    row = torch.arange(len(chosen), device=weights.device)
    inside = blocks[row, chosen].cumsum(-1, dtype=torch.float64)
    # Both sums round in their own way: the rest stays below the block's own total.
    share = (rest / inside[:, -1]).clamp_(min=0.0, max=1.0 - 2.0**-48)
    return chosen * block + _first_past(inside, share)[0]


def _first_past(sums: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """The first index [R] where sums [R, K] pass number * total, and by how much the target
    passes the sum before it. A number below 1 never ends at an index that adds nothing."""
    targets = (numbers * sums[:, -1])[:, None]
    index = torch.searchsorted(sums, targets, right=True)
    before = torch.where(index > 0, sums.gather(1, (index - 1).clamp_(min=0)), 0.0)
    return index[:, 0], (targets - before)[:, 0]


def _block_size(count: int) -> int:
    """The largest power of two that divides `count`, at most _LARGEST_BLOCK."""
    return min(count & -count, _LARGEST_BLOCK)
