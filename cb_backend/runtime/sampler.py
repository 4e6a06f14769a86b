"""Logits to tokens, each row with its own parameters and its own random numbers.

A row's random number depends on its request's seed and the token's position alone, so a request
draws the same tokens alone, in a batch, or after preemption. Engine thread.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cb_backend.runtime.token_batch import SamplingRows

# Candidates that a nucleus is first looked for in; where they do not reach top_p, all are sorted.
_FIRST_CANDIDATES = 256
_LARGEST_BLOCK = 256
_SMALLEST_BLOCK = 16


def sample(
    logits: Tensor, rows: SamplingRows
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Token ids [R] of logits [R, V], and which rows are sound [R].

    A row with a NaN, an infinity, or nothing but minus infinities is not, and its id means nothing.
    """
    best, best_logits = _argmax(logits)
    sound = torch.isfinite(best_logits)
    drawn = torch.from_numpy(rows.temperature > 0).to(logits.device) & sound
    tokens = best
    if (rows.temperature > 0).any() and bool(drawn.any()):
        index = drawn.nonzero()[:, 0]
        tokens = best.clone()
        tokens[index] = _draw(logits[index], best_logits[index], _select(rows, index))
    return tokens.cpu().numpy(), sound.cpu().numpy()


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


def _argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The first index [R] of each row's largest logit and its value; a NaN counts as largest.

    By blocks: torch reduces bfloat16 to indices one element at a time, but maxima by vectors.
    """
    num_rows, vocab_size = logits.shape
    block = min(vocab_size & -vocab_size, _LARGEST_BLOCK)  # the largest power of two that divides
    if block < _SMALLEST_BLOCK:
        values, index = logits.float().max(-1)
        return index, values
    blocks = logits.view(num_rows, -1, block)
    values, best_block = blocks.amax(-1).float().max(-1)
    row = torch.arange(num_rows, device=logits.device)
    index = blocks[row, best_block].float().argmax(-1)
    return best_block * block + index, values


def _select(rows: SamplingRows, index: Tensor) -> SamplingRows:
    chosen = index.cpu().numpy()
    return SamplingRows(
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
    weights = torch.exp((logits.float() - best_logits[:, None]) / temperature[:, None])  # [R, V]
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
    weights: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, numbers: Tensor
) -> Tensor:
    """Like `_draw` for rows that look at their candidates from the most likely down."""
    vocab_size = weights.shape[1]
    limits = torch.where(top_k > 0, top_k, vocab_size)  # candidates that top_k leaves a row
    num_first = max(_FIRST_CANDIDATES, int(torch.where(top_k > 0, top_k, 0).max()))
    count = min(vocab_size, num_first)
    sorted_weights, candidates = weights.topk(count, -1)
    totals = weights.sum(-1, dtype=torch.float64)
    kept, reached = _nucleus(sorted_weights, limits, top_p, totals)
    if not bool(reached.all()):
        sorted_weights, candidates = torch.sort(weights, stable=True, dim=-1, descending=True)
        kept, _ = _nucleus(sorted_weights, limits, top_p, totals)
    kept &= sorted_weights >= min_p[:, None]
    drawn = _invert(torch.where(kept, sorted_weights, 0.0), numbers)
    return candidates.gather(1, drawn[:, None])[:, 0]


def _nucleus(
    sorted_weights: Tensor, limits: Tensor, top_p: Tensor, totals: Tensor
) -> tuple[Tensor, Tensor]:
    """Which sorted candidates [R, K] stay, and for which rows [R] more could not add any."""
    count = sorted_weights.shape[1]
    in_top_k = torch.arange(count, device=limits.device) < limits[:, None]
    sums = torch.where(in_top_k, sorted_weights, 0.0).cumsum(-1, dtype=torch.float64)
    limited = limits <= count
    totals = torch.where(limited, sums[:, -1], totals)
    goals = top_p.double() * totals
    before = torch.cat((torch.zeros_like(sums[:, :1]), sums[:, :-1]), -1)
    kept = in_top_k & ((before < goals[:, None]) | (top_p >= 1.0)[:, None])
    return kept, limited | ((sums[:, -1] >= goals) & (top_p < 1.0))


def _invert(weights: Tensor, numbers: Tensor) -> Tensor:
    """The first index [R] where the running sum of weights [R, K] passes number * total."""
    sums = weights.cumsum(-1, dtype=torch.float64)
    targets = numbers[:, None] * sums[:, -1:]
    return torch.searchsorted(sums, targets, right=True)[:, 0].clamp_(max=weights.shape[1] - 1)
