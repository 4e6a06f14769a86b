"""300 seeds hold, a failure shrinks, and every planted bug is found."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.simulation.__main__ import failure_of, report
from tests.simulation.mutants import MUTANTS, Mutant
from tests.simulation.mutants_ahead import MUTANTS_AHEAD
from tests.simulation.planting import planted
from tests.simulation.scenario import Abort, Submit
from tests.simulation.shrink import shrink
from tests.simulation.world import draw, run

NUM_SEEDS = 300
SEEDS_PER_TEST = 30
MAX_SEEDS_PER_MUTANT = 1000


@pytest.fixture(autouse=True)
def quiet_failed_steps() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("first", range(0, NUM_SEEDS, SEEDS_PER_TEST))
def test_every_seed_holds(first: int) -> None:
    for seed in range(first, first + SEEDS_PER_TEST):
        scenario = draw(seed)
        if failure_of(scenario) is not None:
            pytest.fail(report(scenario))


def test_the_seeds_reach_what_they_are_meant_to_reach() -> None:
    worlds = [run(draw(seed)) for seed in range(40)]
    assert 10 < sum(world.scenario.runs_ahead for world in worlds) < 30
    schedulers = [world.engine.scheduler for world in worlds]
    assert sum(scheduler.planner.num_preemptions for scheduler in schedulers) > 100
    assert sum(scheduler.planner.num_cached_tokens for scheduler in schedulers) > 500
    assert sum(world.engine.stats().failed_steps for world in worlds) > 20
    assert {reason for world in worlds for reason in world.readers.ended.values()} == {
        "stop",
        "length",
        "abort",
        "error",
    }


def test_a_seed_always_draws_the_same_scenario() -> None:
    assert draw(7) == draw(7)
    assert draw(7) != draw(8)


@pytest.mark.parametrize("mutant", [*MUTANTS, *MUTANTS_AHEAD], ids=lambda mutant: mutant.name)
def test_the_planted_bug_is_found(mutant: Mutant) -> None:
    with planted(mutant) as world:
        for seed in range(MAX_SEEDS_PER_MUTANT):
            try:
                world.run(world.draw(seed))
            except Exception:
                return
    pytest.fail(f"{MAX_SEEDS_PER_MUTANT} seeds do not notice: {mutant.name}")


def test_the_real_code_is_back_after_a_mutant() -> None:
    with planted(MUTANTS[0]):
        pass
    run(draw(0))


def test_shrinking_keeps_only_what_the_failure_needs() -> None:
    scenario = draw(3)
    culprit = next(event for event in scenario.events if isinstance(event, Submit))
    pair = next(event for event in scenario.events if isinstance(event, Abort))
    small = shrink(scenario, lambda s: culprit in s.events and pair in s.events)
    assert set(small.events) == {culprit, pair}


def test_a_report_names_the_seed_and_the_smallest_failure() -> None:
    scenario = draw(0)
    first = next(event for event in scenario.events if isinstance(event, Submit))
    empty = replace(first, name="empty", prompt=())
    text = report(replace(scenario, events=(*scenario.events, empty)))
    assert "--seed 0" in text
    assert "shrunk to 1 events" in text
