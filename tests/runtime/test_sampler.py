"""Rows are drawn from the distribution their parameters ask for, each by its own numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from cb_backend.core.sampling_params import SamplingParams
from cb_backend.runtime.sampler import sample, uniforms
from cb_backend.runtime.step_inputs import SamplingRows

GREEDY = SamplingParams(temperature=0.0)


def rows_of(params: list[SamplingParams], seeds: list[int], positions: list[int]) -> SamplingRows:
    return SamplingRows(
        draws=any(p.temperature > 0 for p in params),
        temperature=np.array([p.temperature for p in params], np.float32),
        top_k=np.array([max(p.top_k, 0) for p in params], np.int64),
        top_p=np.array([p.top_p for p in params], np.float32),
        min_p=np.array([p.min_p for p in params], np.float32),
        seeds=np.array(seeds, np.uint64),
        positions=np.array(positions, np.int64),
    )


def draw_many(logits: Tensor, params: SamplingParams, count: int) -> np.ndarray:
    """Tokens of one row of logits [V] for as many seeds."""
    rows = rows_of([params] * count, list(range(count)), [9] * count)
    tokens, sound = sample(logits.expand(count, -1).contiguous(), rows)
    assert sound.all()
    return tokens


def distribution(logits: Tensor, params: SamplingParams) -> np.ndarray:
    """The probabilities asked for, one token after the other: an independent oracle."""
    weights = torch.softmax(logits.double() / params.temperature, -1).tolist()
    ranked = sorted(range(len(weights)), key=lambda token: -weights[token])
    if params.top_k > 0:
        ranked = ranked[: params.top_k]
    whole, passed, kept = sum(weights[t] for t in ranked), 0.0, []
    for token in ranked:
        if passed < params.top_p * whole or params.top_p == 1.0:
            kept.append(token)
        passed += weights[token]
    kept = [t for t in kept if weights[t] >= params.min_p * weights[ranked[0]]]
    result = np.zeros(len(weights))
    result[kept] = [weights[t] for t in kept]
    return result / result.sum()


PARAMS = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.6),
    SamplingParams(temperature=3.0),
    SamplingParams(top_k=5),
    SamplingParams(top_k=1),
    SamplingParams(top_p=0.7),
    SamplingParams(top_p=0.999),
    SamplingParams(top_p=1e-6),
    SamplingParams(min_p=0.2),
    SamplingParams(temperature=1.5, top_k=9, top_p=0.8, min_p=0.1),
]


@pytest.mark.parametrize("vocab_size", [37, 400])
@pytest.mark.parametrize("params", PARAMS, ids=lambda p: f"{p.temperature}-{p.top_k}-{p.top_p}")
def test_draws_follow_the_distribution(params: SamplingParams, vocab_size: int) -> None:
    count = 20_000
    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(3)) * 2
    expected = distribution(logits, params) * count
    observed = np.bincount(draw_many(logits, params, count), minlength=vocab_size)
    assert not observed[expected == 0].any()
    # Chi-square over cells of at least 5; its mean is its degrees of freedom, its variance twice
    # that, so six deviations are out of reach of chance. The seeds are fixed in any case.
    large = expected >= 5
    cells = np.append(expected[large], expected[~large].sum())
    counts = np.append(observed[large], observed[~large].sum())
    cells, counts = cells[cells > 0], counts[cells > 0]
    degrees = max(len(cells) - 1, 1)
    assert ((counts - cells) ** 2 / cells).sum() < degrees + 6 * (2 * degrees) ** 0.5


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(top_p=0.9),  # of 5000 tokens almost alike: more than 4096
        SamplingParams(top_p=0.3),
        SamplingParams(top_k=700),
        SamplingParams(top_k=700, top_p=0.5),
    ],
    ids=lambda p: f"{p.top_k}-{p.top_p}",
)
def test_more_candidates_than_are_first_looked_at_are_found(params: SamplingParams) -> None:
    logits = torch.randn(5000, generator=torch.Generator().manual_seed(1)) * 0.1
    expected = distribution(logits, params)
    assert (expected > 0).sum() > 256
    tokens = draw_many(logits, params, 400)
    assert (expected[tokens] > 0).all()
    assert len(set(tokens.tolist())) > 150


def test_equal_logits_are_drawn_the_same_whatever_shares_the_batch() -> None:
    logits = (torch.randn(1, 6000, generator=torch.Generator().manual_seed(2)) * 2).round()
    params = SamplingParams(top_k=40)
    for seed in range(20):
        alone, _ = sample(logits, rows_of([params], [seed], [3]))
        others = [params, SamplingParams(top_k=3000), SamplingParams(top_p=0.99)]
        together, _ = sample(logits.expand(3, -1), rows_of(others, [seed] * 3, [3] * 3))
        assert alone[0] == together[0]


def test_a_row_draws_the_same_whatever_shares_its_batch() -> None:
    params = [*PARAMS, GREEDY]
    logits = torch.randn(len(params), 400, generator=torch.Generator().manual_seed(5))
    seeds, positions = list(range(len(params))), list(range(7, 7 + len(params)))
    together, _ = sample(logits, rows_of(params, seeds, positions))
    for row in range(len(params)):
        alone, _ = sample(
            logits[row : row + 1], rows_of([params[row]], [seeds[row]], [positions[row]])
        )
        assert alone[0] == together[row]


def test_the_number_depends_on_seed_and_position_alone_and_spreads_evenly() -> None:
    seeds = np.arange(300, dtype=np.uint64).repeat(300)
    positions = np.tile(np.arange(300), 300)
    numbers = uniforms(seeds, positions)
    assert ((numbers > 0) & (numbers < 1)).all()
    assert len(np.unique(numbers)) == numbers.size
    counts = np.histogram(numbers, 100, (0, 1))[0]
    assert ((counts - 900) ** 2 / 900).sum() < 99 + 6 * 198**0.5
    square = numbers.reshape(300, 300)
    assert abs(np.corrcoef(square[:-1].ravel(), square[1:].ravel())[0, 1]) < 0.02
    assert abs(np.corrcoef(square[:, :-1].ravel(), square[:, 1:].ravel())[0, 1]) < 0.02
    assert np.array_equal(uniforms(seeds[::-1], positions[::-1]), numbers[::-1])
    largest = np.array([2**64 - 1], np.uint64)
    assert 0 < uniforms(largest, np.array([2**31]))[0] < 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("vocab_size", [1, 7, 64, 151, 4096, 6000])
def test_greedy_is_the_first_of_the_largest(vocab_size: int, dtype: torch.dtype) -> None:
    logits = torch.randn(9, vocab_size).to(dtype)  # bfloat16 has ties
    tokens, sound = sample(logits, rows_of([GREEDY] * 9, [0] * 9, [1] * 9))
    assert sound.all()
    assert tokens.tolist() == logits.float().argmax(-1).tolist()


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(), SamplingParams(top_p=0.9)], ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_is_reported_and_others_are_not(
    params: SamplingParams, bad: float
) -> None:
    logits = torch.randn(3, 64)
    alone, _ = sample(logits, rows_of([params] * 3, [1, 2, 3], [4, 4, 4]))
    if bad == float("-inf"):
        logits[1] = bad
    else:
        logits[1, 17] = bad
    tokens, sound = sample(logits, rows_of([params] * 3, [1, 2, 3], [4, 4, 4]))
    assert sound.tolist() == [True, False, True]
    assert tokens[[0, 2]].tolist() == alone[[0, 2]].tolist()


def test_a_token_masked_by_minus_infinity_is_sound_and_never_drawn() -> None:
    logits = torch.zeros(16)
    logits[3:] = float("-inf")
    assert set(draw_many(logits, SamplingParams(), 500).tolist()) == {0, 1, 2}


def test_extreme_temperatures_neither_overflow_nor_leave_the_vocabulary() -> None:
    logits = torch.tensor([1e4, -1e4, 3e4, 2.9e4])
    assert set(draw_many(logits, SamplingParams(temperature=1e-6), 50).tolist()) == {2}
    assert set(draw_many(logits, SamplingParams(temperature=100.0), 50).tolist()) <= {0, 2, 3}


SMALLEST = (5e-324, 1e-320, 1e-45, 1e-38, 1e-8)  # some of them are 0 as a float32


@pytest.mark.parametrize("num_tokens", [1, 7, 343, 4096])
@pytest.mark.parametrize("top_k", [0, 1, 5])
def test_a_parameter_that_float32_cannot_hold_draws_the_likeliest_token(
    num_tokens: int, top_k: int
) -> None:
    logits = torch.randn(num_tokens, generator=torch.Generator().manual_seed(1)) * 5
    params = [SamplingParams(top_p=small, top_k=top_k) for small in SMALLEST]
    params += [SamplingParams(temperature=small, top_k=top_k) for small in SMALLEST]
    params += [SamplingParams(min_p=1.0, top_p=small, top_k=top_k) for small in SMALLEST]
    rows = rows_of(params, list(range(len(params))), [0] * len(params))
    tokens, sound = sample(logits.expand(len(params), -1).contiguous(), rows)
    assert sound.all()
    assert set(tokens.tolist()) == {int(logits.argmax())}
