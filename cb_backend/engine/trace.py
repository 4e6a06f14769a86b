"""The step log as Chrome trace events, for ui.perfetto.dev or chrome://tracing. Pure functions.

One track has the steps, with what each carried; counters stand above; each further track is a
seat of the batch, with the requests that held it. A request that a step leaves out, as after a
preemption, appears as two slices.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from cb_backend.engine.stats import StepRecord

Event = dict[str, Any]

_PROCESS = 1
_STEPS_TRACK = 0  # the seats are the tracks from 1


@dataclass(slots=True)
class _Slice:
    """A request's uninterrupted time in the batch."""

    request_id: str
    seat: int
    began: float
    ended: float
    num_steps: int = 0
    num_tokens: int = 0


def trace_json(records: Sequence[StepRecord]) -> bytes:
    """`chrome_trace` as a file. Event by event: one call of json.dumps for all of them would keep
    the interpreter's lock, and so the engine thread, for tens of milliseconds."""
    trace = chrome_trace(records)
    events = ",\n".join(json.dumps(event) for event in trace["traceEvents"])
    return f'{{"displayTimeUnit":"ms","traceEvents":[{events}]}}'.encode("ascii")


def chrome_trace(records: Sequence[StepRecord]) -> dict[str, Any]:
    """Times are microseconds of the engine's clock."""
    slices = _slices(records)
    num_seats = max((one.seat for one in slices), default=0)
    events = [_name("process_name", "engine"), _name("thread_name", "steps", _STEPS_TRACK)]
    events += [_name("thread_name", f"seat {seat}", seat) for seat in range(1, num_seats + 1)]
    for record in records:
        events += _of_step(record)
    events += [_of_slice(one) for one in slices]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _of_step(record: StepRecord) -> Iterable[Event]:
    began = record.time - record.seconds
    yield _complete(
        f"step {record.step}",
        _STEPS_TRACK,
        began,
        record.time,
        {
            "tokens": record.num_tokens,
            "requests": len(record.rows),
            "running": record.num_running,
            "waiting": record.num_waiting,
            "blocks_in_use": record.blocks_in_use,
            "preemptions": record.num_preemptions,
            **{f"copies_{kind.value}": count for kind, count in record.num_copies.items()},
        },
    )
    for name, value in (
        ("tokens", record.num_tokens),
        ("waiting", record.num_waiting),
        ("blocks in use", record.blocks_in_use),
    ):
        yield {
            "ph": "C",
            "name": name,
            "pid": _PROCESS,
            "ts": _microseconds(began),
            "args": {name: value},
        }


def _slices(records: Sequence[StepRecord]) -> list[_Slice]:
    slices: list[_Slice] = []
    open_slices: dict[str, _Slice] = {}
    for record in records:
        present = {request_id for request_id, _ in record.rows}
        open_slices = {rid: one for rid, one in open_slices.items() if rid in present}
        for request_id, num_tokens in record.rows:
            one = open_slices.get(request_id)
            if one is None:
                taken = {other.seat for other in open_slices.values()}
                seat = next(seat for seat in range(1, len(taken) + 2) if seat not in taken)
                one = _Slice(request_id, seat, record.time - record.seconds, record.time)
                open_slices[request_id] = one
                slices.append(one)
            one.ended = record.time
            one.num_steps += 1
            one.num_tokens += num_tokens
    return slices


def _of_slice(one: _Slice) -> Event:
    args = {"steps": one.num_steps, "tokens": one.num_tokens}
    return _complete(one.request_id, one.seat, one.began, one.ended, args)


def _complete(name: str, track: int, began: float, ended: float, args: dict[str, int]) -> Event:
    return {
        "ph": "X",
        "name": name,
        "pid": _PROCESS,
        "tid": track,
        "ts": _microseconds(began),
        "dur": _microseconds(ended - began),
        "args": args,
    }


def _name(what: str, name: str, track: int = _STEPS_TRACK) -> Event:
    return {"ph": "M", "name": what, "pid": _PROCESS, "tid": track, "args": {"name": name}}


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 1)
