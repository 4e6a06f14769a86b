"""`python -m tests.simulation --seed N` plays one seed; `--seeds N` many; a failure is shrunk."""

from __future__ import annotations

import argparse
import logging
import sys
import time

from tests.simulation.scenario import Scenario
from tests.simulation.shrink import shrink
from tests.simulation.world import draw, run


def failure_of(scenario: Scenario) -> Exception | None:
    try:
        run(scenario)
    except Exception as error:
        return error
    return None


def report(scenario: Scenario) -> str:
    """What fails, and the smallest form of it."""
    small = shrink(scenario, lambda candidate: failure_of(candidate) is not None)
    lines = [
        f"seed {scenario.seed} fails: {failure_of(scenario)}",
        f"python -m tests.simulation --seed {scenario.seed}",
        f"shrunk to {len(small.events)} events: {failure_of(small)}",
        f"  {small.limits}",
        *(f"  {event}" for event in small.events),
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds from there")
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)  # failed steps are part of the play
    started, steps = time.monotonic(), 0
    for seed in range(arguments.seed, arguments.seed + arguments.seeds):
        scenario = draw(seed)
        if failure_of(scenario) is not None:
            print(report(scenario))
            return 1
        steps += run(scenario).steps
    print(f"{arguments.seeds} seeds, {steps} steps, {time.monotonic() - started:.1f} s: all held")
    return 0


if __name__ == "__main__":
    sys.exit(main())
