from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from cb_backend.core.step_io import CopyKind
from cb_backend.engine.stats import StepRecord
from cb_backend.engine.trace import chrome_trace, trace_json


def record(step: int, *rows: tuple[str, int], **fields: Any) -> StepRecord:
    """A step of a tenth of a second that ends at as many seconds as its number says."""
    values: dict[str, Any] = {
        "num_running": len(rows),
        "num_waiting": 0,
        "blocks_in_use": 0,
        "num_preemptions": 0,
        "num_copies": {},
    }
    values["request_ids"] = tuple(request_id for request_id, _ in rows)
    values["num_scheduled_tokens"] = tuple(count for _, count in rows)
    return StepRecord(step=step, time=float(step), seconds=0.1, **(values | fields))


def events_of(records: Sequence[StepRecord], kind: str) -> list[dict[str, Any]]:
    trace = json.loads(json.dumps(chrome_trace(records)))
    return [event for event in trace["traceEvents"] if event["ph"] == kind]


def seats_of(records: Sequence[StepRecord]) -> list[dict[str, Any]]:
    return [event for event in events_of(records, "X") if event["tid"] > 0]


def test_a_step_is_a_slice_with_all_that_it_carried() -> None:
    one = record(
        3,
        ("a", 5),
        ("b", 1),
        num_waiting=7,
        blocks_in_use=9,
        num_preemptions=2,
        num_copies={CopyKind.FORK: 1, CopyKind.OUT: 4},
    )
    (step,) = (event for event in events_of([one], "X") if event["tid"] == 0)
    assert (step["name"], step["ts"], step["dur"]) == ("step 3", 2.9e6, 1e5)
    assert step["args"] == {
        "tokens": 6,
        "requests": 2,
        "running": 2,
        "waiting": 7,
        "blocks_in_use": 9,
        "preemptions": 2,
        "copies_fork": 1,
        "copies_out": 4,
    }


def test_counters_follow_the_steps() -> None:
    counters = events_of([record(1, ("a", 4), blocks_in_use=2), record(2, blocks_in_use=5)], "C")
    blocks = [event["args"] for event in counters if event["name"] == "blocks in use"]
    assert blocks == [{"blocks in use": 2}, {"blocks in use": 5}]


def test_a_request_is_one_slice_from_its_first_step_to_its_last() -> None:
    (one,) = seats_of([record(1, ("a", 8)), record(2, ("a", 1)), record(3, ("a", 1))])
    assert (one["name"], one["ts"], one["dur"]) == ("a", 0.9e6, 2.1e6)
    assert one["args"] == {"steps": 3, "tokens": 10}


def test_a_request_that_was_left_out_of_a_step_is_two_slices() -> None:
    slices = seats_of([record(1, ("a", 8)), record(2, ("b", 1)), record(3, ("a", 1))])
    assert [one["name"] for one in slices] == ["a", "b", "a"]


def test_slices_that_share_a_step_have_seats_of_their_own_and_free_ones_are_used_again() -> None:
    slices = seats_of(
        [
            record(1, ("a", 1), ("b", 1), ("c", 1)),
            record(2, ("a", 1), ("c", 1), ("d", 1)),
            record(3, ("e", 1), ("d", 1)),
        ]
    )
    assert {one["name"]: one["tid"] for one in slices} == {"a": 1, "b": 2, "c": 3, "d": 2, "e": 1}


def test_every_track_has_a_name_even_with_no_steps() -> None:
    assert len(events_of([], "M")) == 2
    names = events_of([record(1, ("a", 1), ("b", 1))], "M")
    assert [event["args"]["name"] for event in names] == ["engine", "steps", "seat 1", "seat 2"]


def test_the_file_is_the_same_as_json() -> None:
    records = [record(1, ("a", 8), num_copies={CopyKind.IN: 1}), record(2, ("a", 1), ("b", 3))]
    assert json.loads(trace_json(records)) == chrome_trace(records)
    assert json.loads(trace_json([])) == chrome_trace([])
