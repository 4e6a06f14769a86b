"""The requests to plan for: those of a recording, or drawn."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from cb_backend.errors import RecordingError
from cb_backend.planning.recording import Arrival, End, Recording


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests with their outputs, in the order of arrival."""

    requests: tuple[tuple[Arrival, End], ...]
    block_size: int  # tokens of the blocks in which their prefixes are described
    num_left_out: int = 0  # of the recording: no output is known of them

    @property
    def num_prompt_tokens(self) -> int:
        return sum(arrival.num_prompt_tokens for arrival, _ in self.requests)

    @property
    def num_output_tokens(self) -> int:
        return sum(end.num_output_tokens for _, end in self.requests)

    @property
    def seconds(self) -> float:
        """From the first arrival to the last."""
        return self.requests[-1][0].time - self.requests[0][0].time

    def split(self, num_replicas: int) -> list[list[tuple[Arrival, End]]]:
        """In turn; the choices of one prompt stay together, as they share its blocks."""
        shares: list[list[tuple[Arrival, End]]] = [[] for _ in range(num_replicas)]
        place: dict[str, int] = {}
        num_parents = 0
        for arrival, end in self.requests:
            replica = place.get(arrival.fork_of or "")
            if replica is None:
                replica = num_parents % num_replicas
                num_parents += 1
            place[arrival.request_id] = replica
            shares[replica].append((arrival, end))
        return shares


def trace_of(recording: Recording) -> Trace:
    """What was recorded, each request with the output it got. Raises RecordingError if none did."""
    ends = recording.ends
    arrivals = list(recording.arrivals)
    known = [
        (arrival, ends[arrival.number])
        for arrival in arrivals
        if arrival.number in ends and ends[arrival.number].num_output_tokens > 0
    ]
    if not known:
        raise RecordingError("no recorded request got any output: there is nothing to plan for")
    known.sort(key=lambda request: request[0].time)
    return Trace(tuple(known), recording.header.limits.block_size, len(arrivals) - len(known))


@dataclass(frozen=True, slots=True)
class Synthetic:
    """Poisson arrivals; lengths drawn evenly from ranges, ends included."""

    requests: int = 200
    rate: float = 1.0  # requests per second
    prompt: tuple[int, int] = (16, 256)  # tokens
    output: tuple[int, int] = (16, 192)  # tokens
    shared: int = 0  # leading tokens that all prompts have in common
    seed: int = 0

    def draw(self, block_size: int) -> Trace:
        rng = random.Random(self.seed)
        clock, requests = 0.0, []
        for number in range(self.requests):
            clock += rng.expovariate(self.rate)
            num_prompt = rng.randint(*self.prompt)
            num_output = rng.randint(*self.output)
            num_shared = min(self.shared, num_prompt) // block_size
            arrival = Arrival(
                number=number,
                request_id=f"r{number}",
                time=clock,
                num_prompt_tokens=num_prompt,
                max_tokens=num_output,
                priority=0,
                tenant="",
                deadline=math.inf,
                fork_of=None,
                pin_s=0.0,
                blocks=tuple(f"shared {index}" for index in range(num_shared)),
            )
            requests.append((arrival, End(number, "length", num_output, ())))
        return Trace(tuple(requests), block_size)


def parse_synthetic(text: str) -> Synthetic:
    """`rate=4,requests=200,prompt=16..256,output=100`. Raises RecordingError naming the part."""
    values: dict[str, int | float | tuple[int, int]] = {}
    for part in text.split(","):
        name, _, value = (piece.strip() for piece in part.partition("="))
        try:
            values[name] = _PARSERS[name](value)
        except (KeyError, ValueError):
            raise RecordingError(
                f"--synthetic has {part!r}; its parts are {', '.join(_PARSERS)},"
                " as in rate=4,requests=200,prompt=16..256,output=16..192"
            ) from None
    return Synthetic(**values)  # type: ignore[arg-type]


def _count(text: str) -> int:
    return _at_least(int(text), 1)


def _rate(text: str) -> float:
    rate = float(text)
    if not (math.isfinite(rate) and rate > 0):
        raise ValueError(text)
    return rate


def parse_range(text: str) -> tuple[int, int]:
    """`3..8`, or `5` for 5..5, both at least 1. Raises ValueError."""
    low, dots, high = text.partition("..")
    first = _at_least(int(low), 1)
    return first, _at_least(int(high), first) if dots else first


def _at_least(value: int, low: int) -> int:
    if value < low:
        raise ValueError(value)
    return value


_PARSERS: dict[str, Callable[[str], int | float | tuple[int, int]]] = {
    "requests": _count,
    "rate": _rate,
    "prompt": parse_range,
    "output": parse_range,
    "shared": lambda text: _at_least(int(text), 0),
    "seed": int,
}
