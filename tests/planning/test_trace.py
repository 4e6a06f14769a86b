from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cb_backend.errors import RecordingError
from cb_backend.planning.recording import End, read_recording
from cb_backend.planning.trace import Synthetic, Trace, parse_synthetic, trace_of
from tests.planning.recorded import record_two_requests


def test_a_trace_is_what_was_recorded_with_the_output_it_got(tmp_path: Path) -> None:
    record_two_requests(tmp_path / "run.jsonl")
    trace = trace_of(read_recording(tmp_path / "run.jsonl"))
    assert (trace.num_prompt_tokens, trace.num_output_tokens) == (18, 6)
    assert trace.block_size == 4
    assert trace.num_left_out == 0


def test_requests_without_output_are_left_out_and_counted(tmp_path: Path) -> None:
    record_two_requests(tmp_path / "run.jsonl")
    recording = read_recording(tmp_path / "run.jsonl")
    entries = tuple(
        End(1, "abort", 0, ()) if isinstance(entry, End) and entry.number == 1 else entry
        for entry in recording.entries
    )
    trace = trace_of(replace(recording, entries=entries))
    assert (len(trace.requests), trace.num_left_out) == (1, 1)
    with pytest.raises(RecordingError, match="nothing to plan for"):
        trace_of(replace(recording, entries=()))


def test_a_drawn_trace_keeps_to_its_ranges_and_its_seed() -> None:
    drawn = Synthetic(requests=500, rate=5.0, prompt=(3, 9), output=(2, 4), shared=4)
    trace = drawn.draw(block_size=2)
    assert trace == drawn.draw(block_size=2)
    assert trace != replace(drawn, seed=1).draw(block_size=2)
    lengths = [arrival.num_prompt_tokens for arrival, _ in trace.requests]
    assert (min(lengths), max(lengths)) == (3, 9)
    assert {end.num_output_tokens for _, end in trace.requests} == {2, 3, 4}
    assert 80 < trace.seconds < 120
    assert {arrival.blocks for arrival, _ in trace.requests} == {
        ("shared 0",),
        ("shared 0", "shared 1"),
    }


def test_requests_are_split_in_turn_and_the_choices_of_a_prompt_stay_together() -> None:
    requests = Synthetic(requests=5, rate=1.0).draw(16).requests
    (first, end), *others = requests
    fork = (replace(first, request_id="fork", fork_of="r0"), end)
    trace = Trace(((first, end), fork, *others), 16)
    names = [[arrival.request_id for arrival, _ in share] for share in trace.split(2)]
    assert names == [["r0", "fork", "r2", "r4"], ["r1", "r3"]]


def test_a_synthetic_trace_is_described_in_parts() -> None:
    assert parse_synthetic("rate=4, requests=20, prompt=16..32, output=5, shared=8, seed=3") == (
        Synthetic(20, 4.0, (16, 32), (5, 5), 8, 3)
    )
    assert parse_synthetic("rate=2") == Synthetic(rate=2.0)


@pytest.mark.parametrize(
    "part", ["", "rate", "rate=0", "rate=inf", "requests=0", "prompt=9..3", "output=x", "size=1"]
)
def test_a_part_that_makes_no_sense_is_named(part: str) -> None:
    with pytest.raises(RecordingError, match="its parts are requests, rate, prompt") as refused:
        parse_synthetic(f"rate=4,{part}")
    assert repr(part) in refused.value.message
