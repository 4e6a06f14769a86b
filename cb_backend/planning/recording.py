"""Reads a recording back. It is checked here, so that nobody later meets a wrong type."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TypeVar

from cb_backend.core.recorded_step import FORMAT, Json
from cb_backend.core.scheduler_limits import SchedulerLimits
from cb_backend.core.swap_costs import SwapCosts
from cb_backend.errors import RecordingError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Header:
    """What the recorded engine was."""

    limits: SchedulerLimits
    policy: str
    priority_ageing_s: float
    tenant_weights: dict[str, float]  # by hashed tenant
    target_itl_s: float | None
    model: Json


@dataclass(frozen=True, slots=True)
class Arrival:
    number: int
    request_id: str
    time: float  # seconds, the engine's clock, when the client's request was accepted
    num_prompt_tokens: int
    max_tokens: int
    priority: int
    tenant: str  # hashed
    deadline: float
    fork_of: str | None
    pin_s: float  # seconds that its prompt stays in the cache
    blocks: tuple[str, ...]  # hashes of the prompt's full blocks


@dataclass(frozen=True, slots=True)
class Refused:
    time: float
    num_prompt_tokens: int
    max_tokens: int
    code: str


@dataclass(frozen=True, slots=True)
class Abort:
    number: int


@dataclass(frozen=True, slots=True)
class Change:
    what: str
    to: str | int


@dataclass(frozen=True, slots=True)
class Restored:
    """Prefixes that came from a file at the start, least recently used first."""

    blocks: tuple[str, ...]  # hashes; none if they could not be read
    num_blocks: int  # of the pool that were meant for them


@dataclass(frozen=True, slots=True)
class Launch:
    """A step's beginning; its end comes at once, or after whatever happened meanwhile."""

    step: int
    decision: Json  # as `recorded_step.decision` makes it


@dataclass(frozen=True, slots=True)
class Step:
    """Its end."""

    step: int
    end: float  # seconds, the engine's clock
    seconds: float
    decision: Json  # of its launch
    failed: frozenset[int] | None  # None: the step raised and all its requests failed
    took: dict[int, int]  # output tokens of who took more than one


@dataclass(frozen=True, slots=True)
class End:
    number: int
    reason: str | None  # None: it lived on when the recording ended
    num_output_tokens: int
    blocks: tuple[str, ...]  # hashes of the full blocks that followed the prompt's


Entry = Arrival | Refused | Abort | Change | Restored | Launch | Step | End


@dataclass(frozen=True, slots=True)
class Recording:
    header: Header
    entries: tuple[Entry, ...]  # in the order in which they happened

    @property
    def arrivals(self) -> Iterator[Arrival]:
        return (entry for entry in self.entries if isinstance(entry, Arrival))

    @property
    def steps(self) -> Iterator[Step]:
        return (entry for entry in self.entries if isinstance(entry, Step))

    @property
    def ends(self) -> dict[int, End]:
        return {entry.number: entry for entry in self.entries if isinstance(entry, End)}


def read_recording(path: Path) -> Recording:
    """Raises RecordingError naming the file, the line and what is wrong with it.

    A last line without its newline is what a killed process leaves, and is left out.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise RecordingError(f"{path} cannot be read: {reason}") from None
    lines = text.split("\n")[:-1]
    if not lines:
        raise RecordingError(f"{path} holds no line; a recording begins with a header")
    header = _read_line(path, 1, lines[0], _header)
    in_flight: dict[int, Launch] = {}
    entries: list[Entry] = []
    for number, line in enumerate(lines[1:], 2):
        entries += _read_line(path, number, line, partial(_entries, in_flight=in_flight))
    return Recording(header, tuple(entries))


def _read_line(path: Path, number: int, line: str, read: Callable[[Json], T]) -> T:
    try:
        return read(json.loads(line))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        why = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise RecordingError(f"{path}, line {number}: {why}") from None


def _header(line: Json) -> Header:
    if line.get("kind") != "header":
        raise ValueError("this is no header, so the file is no recording")
    if line["format"] != FORMAT:
        raise ValueError(f"format {line['format']!r}, this version reads format {FORMAT}")
    return Header(
        limits=_limits(line["limits"]),
        policy=line["policy"],
        priority_ageing_s=float(line["priority_ageing_s"]),
        tenant_weights=dict(line["tenant_weights"]),
        target_itl_s=line["target_itl_s"],
        model=line["model"],
    )


def _limits(values: Json) -> SchedulerLimits:
    names = {field.name for field in fields(SchedulerLimits)}
    if unknown := values.keys() - names:
        raise ValueError(f"limits that this version does not know: {', '.join(sorted(unknown))}")
    return SchedulerLimits(**{**values, "swap_costs": SwapCosts(**values["swap_costs"])})


def _entries(line: Json, in_flight: dict[int, Launch]) -> list[Entry]:
    """What a line tells: the launch and the end of a step may share one."""
    kind = line["kind"]
    if kind == "launch":
        launch = in_flight[int(line["step"])] = _launch(line)
        return [launch]
    if kind == "step":
        launched = in_flight.pop(int(line["step"]), None)
        launch = launched or _launch(line)
        step = _step(line, launch.decision)
        return [launch, step] if launched is None else [step]
    if kind not in _READERS:
        raise ValueError(f"kind {kind!r} is none of {', '.join(_READERS)}, launch, step")
    return [_READERS[kind](line)]


def _arrival(line: Json) -> Arrival:
    return Arrival(
        number=int(line["request"]),
        request_id=_request_id(int(line["request"])),
        time=float(line["time"]),
        num_prompt_tokens=int(line["prompt"]),
        max_tokens=int(line["max_tokens"]),
        priority=int(line["priority"]),
        tenant=str(line["tenant"]),
        deadline=math.inf if line["deadline"] is None else float(line["deadline"]),
        fork_of=None if line["fork_of"] is None else _request_id(int(line["fork_of"])),
        pin_s=float(line["pin_s"]),
        blocks=tuple(line["blocks"]),
    )


def _request_id(number: int) -> str:
    return f"r{number}"


def _refused(line: Json) -> Refused:
    return Refused(
        float(line["time"]), int(line["prompt"]), int(line["max_tokens"]), str(line["code"])
    )


def _launch(line: Json) -> Launch:
    if "rows" not in line:
        raise ValueError(f"step {line['step']} ends, and was never launched")
    return Launch(int(line["step"]), {name: line[name] for name in _DECISION if name in line})


def _step(line: Json, decision: Json) -> Step:
    failed = line.get("failed", [])
    return Step(
        step=int(line["step"]),
        end=float(line["end"]),
        seconds=float(line["seconds"]),
        decision=decision,
        failed=None if failed is True else frozenset(failed),
        took=dict(line.get("took", [])),
    )


def _end(line: Json) -> End:
    return End(int(line["request"]), line["reason"], int(line["output"]), tuple(line["blocks"]))


_DECISION = ("budget", "rows", "admitted", "retired", "copies")
_READERS: dict[str, Callable[[Json], Entry]] = {
    "arrival": _arrival,
    "refused": _refused,
    "abort": lambda line: Abort(int(line["request"])),
    "change": lambda line: Change(str(line["what"]), line["to"]),
    "restored": lambda line: Restored(tuple(line["blocks"]), int(line["num_blocks"])),
    "end": _end,
}
