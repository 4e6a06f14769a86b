"""What happens in a simulation, drawn from one seed: a configuration and a list of events.

Few distinct tokens and shared prefixes, so that blocks meet.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from cb_backend.core.policies import POLICIES
from tests.fakes import next_by_hashing, solo_output

NUM_EVENTS = 60
MOST_TOKENS = 44  # of a prompt and its output
POLICY_NAMES = sorted(POLICIES)
AGEING_S = 0.5  # a simulated step takes some hundredths of a second
WEIGHTS = {"a": 1.0, "b": 2.0}


@dataclass(frozen=True, slots=True)
class Limits:
    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_prefill_chunk: int
    enable_prefix_caching: bool
    num_host_blocks: int
    policy: str
    window: int | None


@dataclass(frozen=True, slots=True)
class Submit:
    """`steps_before` steps run first, as before every other event."""

    steps_before: int
    name: str
    prompt: tuple[int, ...]
    max_tokens: int
    stop_token_ids: tuple[int, ...]
    salt: str
    priority: int
    tenant: str
    deadline_s: float  # from its arrival
    fork_of: str | None
    pin_s: float
    pace: int  # steps between two reads of its output


@dataclass(frozen=True, slots=True)
class Abort:
    steps_before: int
    name: str


@dataclass(frozen=True, slots=True)
class FailStep:
    """The next step raises: when it is launched, or on the device, with its rows half taken in."""

    steps_before: int
    at_launch: bool


@dataclass(frozen=True, slots=True)
class FailRow:
    """The named request fails alone in the next step that it takes part in."""

    steps_before: int
    name: str


@dataclass(frozen=True, slots=True)
class UsePolicy:
    steps_before: int
    policy: str


@dataclass(frozen=True, slots=True)
class Resize:
    steps_before: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Drain:
    """Nothing new is taken; what still lives after so many steps ends with an error."""

    steps_before: int
    steps_left: int


@dataclass(frozen=True, slots=True)
class Crash:
    """The next block allocation raises: a bug of ours, which ends the engine."""

    steps_before: int


Event = Submit | Abort | FailStep | FailRow | UsePolicy | Resize | Drain | Crash


@dataclass(frozen=True, slots=True)
class Scenario:
    seed: int
    limits: Limits
    events: tuple[Event, ...]
    runs_ahead: bool  # whether the executor does


def draw(seed: int) -> Scenario:
    """The scenario of a seed."""
    rng = random.Random(seed)
    limits = _draw_limits(rng)
    prefixes = [[rng.randrange(4) for _ in range(16)] for _ in range(3)]
    events: list[Event] = []
    names: list[str] = []
    for number in range(NUM_EVENTS):
        steps = rng.choice([0, 0, 0, 1, 1, 2, 3, 8])
        if rng.random() < 0.75 or not names:
            submits = _draw_submits(rng, steps, f"r{number}", prefixes)
            events += submits
            names += [submit.name for submit in submits]
        else:
            events.append(_draw_trouble(rng, steps, rng.choice(names[-8:]), limits))
    if (end := rng.random()) < 0.2:
        events.append(Drain(rng.randint(0, 5), rng.choice([0, 5, 40])))
    elif end < 0.3:
        events.append(Crash(rng.randint(0, 5)))
    return Scenario(seed, limits, tuple(events), runs_ahead=rng.random() < 0.5)


def _draw_submits(
    rng: random.Random, steps: int, name: str, prefixes: Sequence[Sequence[int]]
) -> list[Submit]:
    """A request, sometimes with others that share its prompt."""
    first = _draw_submit(rng, steps, name, prefixes)
    num_forks = rng.randint(1, 3) if rng.random() < 0.15 else 0
    return [first] + [
        replace(
            first,
            steps_before=0,
            name=f"{name}.{choice}",
            max_tokens=rng.randint(1, first.max_tokens),
            fork_of=name,
        )
        for choice in range(num_forks)
    ]


def _draw_trouble(rng: random.Random, steps: int, name: str, limits: Limits) -> Event:
    kind = rng.random()
    if kind < 0.5:
        return Abort(steps, name)
    if kind < 0.65:
        return FailRow(steps, name)
    if kind < 0.75:
        return FailStep(steps, at_launch=rng.random() < 0.5)
    if kind < 0.87:
        return UsePolicy(steps, rng.choice(POLICY_NAMES))
    fewest = -(-MOST_TOKENS // limits.block_size)
    return Resize(steps, fewest + rng.choice([0, 0, 1, 5, 30]))


def _draw_limits(rng: random.Random) -> Limits:
    block_size = rng.choice([1, 2, 3, 4, 8, 16])
    max_num_seqs = rng.randint(1, 8)
    budget = rng.randint(max_num_seqs, 40)
    return Limits(
        block_size=block_size,
        # From barely enough for the largest request to room for all.
        num_blocks=-(-MOST_TOKENS // block_size) + rng.choice([0, 1, 3, 10, 60]),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_prefill_chunk=rng.randint(1, budget),
        enable_prefix_caching=rng.random() < 0.8,
        num_host_blocks=rng.choice([0, 1, 3, 12, 40]),
        policy=rng.choice(POLICY_NAMES),
        window=rng.choice([None, None, 2, 5, 17]),
    )


def _draw_submit(
    rng: random.Random, steps: int, name: str, prefixes: Sequence[Sequence[int]]
) -> Submit:
    head = list(rng.choice(prefixes)[: rng.randint(0, 16)])
    tail = [rng.randrange(4) for _ in range(rng.randint(0, 8))]
    prompt = tuple(head + tail) or (0,)
    max_tokens = rng.randint(1, MOST_TOKENS - len(prompt))
    stops: tuple[int, ...] = ()
    if rng.random() < 0.4:
        output = solo_output(prompt, max_tokens, next_by_hashing)
        stops = (rng.choice(output),)
    return Submit(
        steps_before=steps,
        name=name,
        prompt=prompt,
        max_tokens=max_tokens,
        stop_token_ids=stops,
        salt=rng.choice(["", "", "x"]),
        priority=rng.choice([0, 0, 0, 1, 5]),
        tenant=rng.choice("abc"),
        deadline_s=rng.choice([math.inf, rng.uniform(0.05, 3.0)]),
        fork_of=None,
        pin_s=rng.choice([0.0, 0.0, 0.0, 1.0, 1e9]),
        pace=rng.choice([1, 1, 3, 20, 1000]),
    )
