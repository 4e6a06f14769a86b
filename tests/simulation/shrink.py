"""Makes a failing scenario small: drops events as long as it still fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from tests.simulation.scenario import Event, Scenario


def shrink(scenario: Scenario, fails: Callable[[Scenario], bool]) -> Scenario:
    """A scenario that still fails and from which no single event can be dropped (ddmin)."""
    events: Sequence[Event] = scenario.events
    size = max(len(events) // 2, 1)
    while True:
        kept = _without_some(scenario, events, size, fails)
        if len(kept) == len(events):
            if size == 1:
                return replace(scenario, events=tuple(events))
            size = max(size // 2, 1)
        events = kept


def _without_some(
    scenario: Scenario, events: Sequence[Event], size: int, fails: Callable[[Scenario], bool]
) -> Sequence[Event]:
    start = 0
    while start < len(events):
        fewer = [*events[:start], *events[start + size :]]
        if fails(replace(scenario, events=tuple(fewer))):
            events = fewer
        else:
            start += size
    return events
