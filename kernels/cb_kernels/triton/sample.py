"""Logits to tokens: a draw from what the filters leave, without a sort.

A row belongs to one program, which reads it several times. A logit's key is the bits of
(largest - logit) / temperature as an integer: the smaller, the likelier, and 0 for the largest.
What a filter keeps is "the keys below t, and of those equal to t the first m", and t is found by
search among the keys, several pivots to a reading (pivots instead of a sort: FlashInfer's sampling,
arXiv 2501.01005). The draw is a race of exponentials over the kept (Gumbel's trick, Gumbel 1954)
with one number per (seed, position, token) from Philox (Salmon et al., SC 2011), so it depends on
nothing else.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cb_kernels.logits import SamplingParameters
from cb_kernels.triton.launch import chip, launch
from cb_kernels.triton.table import options

# Which of Philox's four numbers a token gets depends on this, so all configurations share it.
_LANES = tl.constexpr(1024)
# Seven rounds pass all of the paper's tests; Triton's default of ten is for safety.
_ROUNDS = tl.constexpr(7)
_PAST_INFINITY = tl.constexpr(0x7F800001)  # one more than the key of a logit of minus infinity
_MANY = tl.constexpr(0x7FFFFFFF)


def sample(logits: Tensor, parameters: SamplingParameters) -> tuple[Tensor, Tensor]:
    """See `logits.sample`."""
    num_rows, vocab = logits.shape
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    sound = torch.empty(num_rows, dtype=torch.bool, device=logits.device)
    launch(
        _sample,
        (num_rows,),
        *(logits, tokens, sound, parameters.temperature, parameters.top_k, parameters.top_p),
        *(parameters.min_p, parameters.seeds, parameters.positions),
        *(logits.stride(0), vocab),
        **options("sample", "any", chip(logits)),
    )
    return tokens, sound


@triton.jit
def _sample(
    logits_ptr,  # [R, vocab]
    tokens_ptr,  # [R] int64
    sound_ptr,  # [R] bool
    temperature_ptr,  # [R] float32
    top_k_ptr,  # [R] int64
    top_p_ptr,  # [R] float32
    min_p_ptr,
    seeds_ptr,  # [R] int64
    positions_ptr,  # [R] int64
    row_stride,
    vocab,
    PIVOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    logits_ptr += row.to(tl.int64) * row_stride
    best, token, sound = _best(logits_ptr, vocab, BLOCK)
    temperature = tl.load(temperature_ptr + row)
    if sound & (temperature > 0):
        top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
        t, m = _kept(logits_ptr, best, temperature, vocab, top_k, top_p, PIVOTS, BLOCK)
        min_p, seed = tl.load(min_p_ptr + row), tl.load(seeds_ptr + row)
        position = tl.load(positions_ptr + row)
        token = _draw(logits_ptr, best, temperature, vocab, t, m, min_p, seed, position)
    tl.store(tokens_ptr + row, token.to(tl.int64))
    tl.store(sound_ptr + row, sound)


@triton.jit
def _best(logits_ptr, vocab, BLOCK: tl.constexpr):
    """The largest logit, the first token that has it, and whether the row can be drawn from."""
    lane = tl.arange(0, BLOCK)
    values = tl.full([BLOCK], float("-inf"), tl.float32)
    tokens = lane
    nans = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab, BLOCK):
        inside = start + lane < vocab
        x = tl.load(logits_ptr + start + lane, mask=inside, other=float("-inf")).to(tl.float32)
        nans += (x != x).to(tl.int32)
        better = x > values
        values = tl.where(better, x, values)
        tokens = tl.where(better, start + lane, tokens)
    best = tl.max(values, axis=0)
    token = tl.min(tl.where(values == best, tokens, vocab), axis=0)
    sound = (tl.sum(nans, axis=0) == 0) & (best > float("-inf")) & (best < float("inf"))
    return best, token, sound


@triton.jit
def _distance(logits_ptr, token, vocab, best, temperature):
    """How far below the largest logit, in units of the temperature; infinity past the end."""
    x = tl.load(logits_ptr + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    return (best - x) / temperature


@triton.jit
def _kept(
    logits_ptr,
    best,
    temperature,
    vocab,
    top_k,
    top_p,
    PIVOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """t and m of what top_k, then top_p keep (the module says what t and m are)."""
    t = tl.full([], _PAST_INFINITY, tl.int32)
    m = tl.zeros([], tl.int32)
    if (top_k > 0) & (top_k < vocab):
        goal = top_k.to(tl.float32)
        t, m = _cut(logits_ptr, best, temperature, vocab, t, m, goal, False, PIVOTS, BLOCK)
    if top_p < 1.0:
        goal = top_p * _weight(logits_ptr, best, temperature, vocab, t, m, BLOCK)
        t, m = _cut(logits_ptr, best, temperature, vocab, t, m, goal, True, PIVOTS, BLOCK)
    return t, m


@triton.jit
def _tie_weight(t):
    """The weight, relative to the largest, of a key."""
    return tl.exp(-t.to(tl.float32, bitcast=True))


@triton.jit
def _weight(logits_ptr, best, temperature, vocab, t, m, BLOCK: tl.constexpr):
    """The sum of the weights of what is kept."""
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab, BLOCK):
        token = start + tl.arange(0, BLOCK)
        distance = _distance(logits_ptr, token, vocab, best, temperature)
        below = distance.to(tl.int32, bitcast=True) < t
        sums += tl.where(below, tl.exp(-distance), 0.0)
    ties = tl.where(m > 0, _tie_weight(t) * m, 0.0)
    return tl.sum(sums, axis=0) + ties


@triton.jit
def _cut(
    logits_ptr,
    best,
    temperature,
    vocab,
    t,
    m,
    goal,
    BY_WEIGHT: tl.constexpr,
    PIVOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """t and m of the fewest of the kept whose number, or weight, reaches `goal`."""
    low, low_count, low_sum = tl.full([], -1, tl.int32), tl.zeros([], tl.int32), 0.0
    high, high_count = t, tl.full([], _MANY, tl.int32)
    ready = False
    while (high - low > 1) & (not ready):
        # All in (low, high): `low` does not reach the goal, and `high` does.
        step = (high - low).to(tl.int64) * (tl.arange(0, PIVOTS) + 1) // (PIVOTS + 1)
        pivots = low + step.to(tl.int32)
        count, total = _under(logits_ptr, best, temperature, vocab, pivots, BY_WEIGHT, BLOCK)
        measure = total if BY_WEIGHT else count.to(tl.float32)
        reached = measure >= goal
        high = tl.min(tl.where(reached, pivots, high), axis=0)
        high_count = tl.min(tl.where(reached, count, high_count), axis=0)
        low = tl.max(tl.where(reached, low, pivots), axis=0)
        low_count = tl.max(tl.where(reached, low_count, count), axis=0)
        low_sum = tl.max(tl.where(reached, low_sum, total), axis=0)
        # Then all up to `high` stay, whatever lies between.
        ready = (high_count - low_count == 1) if BY_WEIGHT else (high_count.to(tl.float32) == goal)
    ties = tl.where(high < t, high_count - low_count, m)
    if BY_WEIGHT:
        wanted = tl.ceil((goal - low_sum) / _tie_weight(high))
        wanted = tl.minimum(tl.maximum(wanted, 1.0), 2147483520.0).to(tl.int32)
    else:
        wanted = goal.to(tl.int32) - low_count
    return tl.where(ready, high + 1, high), tl.where(ready, 0, tl.minimum(wanted, ties))


@triton.jit
def _under(
    logits_ptr,
    best,
    temperature,
    vocab,
    pivots,
    BY_WEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """How many keys are at most each pivot [P], and their weights' sum."""
    counts = tl.zeros([pivots.shape[0], BLOCK], tl.int32)
    sums = tl.zeros([pivots.shape[0], BLOCK], tl.float32)
    for start in range(0, vocab, BLOCK):
        token = start + tl.arange(0, BLOCK)
        distance = _distance(logits_ptr, token, vocab, best, temperature)
        key = distance.to(tl.int32, bitcast=True)
        under = key[None, :] <= pivots[:, None]
        counts += under.to(tl.int32)
        if BY_WEIGHT:
            sums += tl.where(under, tl.exp(-distance)[None, :], 0.0)
    return tl.sum(counts, axis=1), tl.sum(sums, axis=1)


@triton.jit
def _draw(logits_ptr, best, temperature, vocab, t, m, min_p, seed, position):
    """The kept token whose exponential clock, at the rate of its weight, rings first."""
    lane = tl.arange(0, _LANES)
    # What is carried from tile to tile: each lane's best score and token, and the ties so far.
    scores = tl.full([_LANES], float("-inf"), tl.float32)
    tokens = lane
    ties = tl.zeros([], tl.int32)
    for start in range(0, vocab, 4 * _LANES):
        bits = tl.philox(
            seed,
            (start // 4 + lane).to(tl.uint32),
            position.to(tl.uint32),
            (position >> 32).to(tl.uint32),
            0,
            n_rounds=_ROUNDS,
        )
        for part in tl.static_range(4):
            token = start + part * _LANES + lane
            distance = _distance(logits_ptr, token, vocab, best, temperature)
            key = distance.to(tl.int32, bitcast=True)
            tied = (key == t).to(tl.int32)
            rank = ties + tl.cumsum(tied, axis=0)
            ties += tl.sum(tied, axis=0)
            kept = (key < t) | ((tied != 0) & (rank <= m))
            kept = kept & (token < vocab) & (tl.exp(-distance) >= min_p)
            score = tl.where(kept, _gumbel(bits[part]) - distance, float("-inf"))
            better = score > scores
            scores = tl.where(better, score, scores)
            tokens = tl.where(better, token, tokens)
    return tl.min(tl.where(scores == tl.max(scores, axis=0), tokens, vocab), axis=0)


@triton.jit
def _gumbel(bits):
    """-log(E) of E exponential with mean 1, from 32 random bits; fine where E is small."""
    u = (bits.to(tl.uint32, bitcast=True).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    u = tl.minimum(u, 0.99999994)
    return -tl.log(tl.where(u < 0.001, u * (1.0 + 0.5 * u), -tl.log(1.0 - u)))
