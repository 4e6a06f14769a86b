from __future__ import annotations

import random

import pytest

from cb_backend.core.rates import StepRates, TokenBudget


def rates_of(overhead: float, per_token: float, noise: float = 0.0) -> StepRates:
    rng, rates = random.Random(0), StepRates()
    for _ in range(300):
        num_tokens = rng.choice([1, 8, 8, 8, 60, 512])
        seconds = (overhead + per_token * num_tokens) * rng.uniform(1 - noise, 1 + noise)
        rates.observe(num_tokens, seconds)
    return rates


def test_nothing_is_known_before_some_steps_have_run() -> None:
    rates = StepRates()
    for _ in range(7):
        rates.observe(10, 0.1)
    assert not rates.is_known
    rates.observe(10, 0.1)
    assert rates.is_known


def test_the_line_that_made_the_steps_is_found() -> None:
    rates = rates_of(0.010, 0.0004, noise=0.05)
    assert rates.step_seconds(200) == pytest.approx(0.090, rel=0.1)
    assert rates.tokens_within(0.090) == pytest.approx(200, rel=0.1)


def test_what_was_slow_long_ago_is_forgotten() -> None:
    rates = rates_of(1.0, 0.01)
    for _ in range(600):
        rates.observe(8, 0.02)
        rates.observe(64, 0.05)
    assert rates.step_seconds(64) == pytest.approx(0.05, rel=0.1)


def test_steps_all_alike_give_a_line_through_the_origin() -> None:
    rates = StepRates()
    for _ in range(50):
        rates.observe(16, 0.08)
    assert rates.tokens_per_s == pytest.approx(200)
    assert rates.tokens_within(0.0401) == 8


def test_larger_steps_that_look_faster_do_not_give_a_negative_cost() -> None:
    rates = StepRates()
    for _ in range(50):
        rates.observe(8, 0.08)
        rates.observe(64, 0.02)
    assert rates.tokens_within(0.0) == 0
    assert rates.step_seconds(1) >= 0


def test_the_budget_follows_the_target_between_its_ends() -> None:
    rates = rates_of(0.010, 0.0004)

    def choose(target_s: float | None) -> int:
        return TokenBudget(low=8, high=512, target_s=target_s).choose(rates)

    assert choose(None) == 512
    assert choose(0.050) == pytest.approx(100, abs=3)
    assert choose(0.001) == 8, "every running request keeps its token"
    assert choose(9.0) == 512


def test_the_budget_is_whole_until_something_is_known() -> None:
    assert TokenBudget(low=8, high=512, target_s=0.001).choose(StepRates()) == 512
