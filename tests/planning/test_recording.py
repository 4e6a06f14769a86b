from __future__ import annotations

import json
from pathlib import Path

import pytest

from cb_backend.errors import RecordingError
from cb_backend.planning.recording import Arrival, End, Launch, Step, read_recording
from tests.planning.recorded import record_two_requests


@pytest.fixture
def path(tmp_path: Path) -> Path:
    record_two_requests(tmp_path / "run.jsonl")
    return tmp_path / "run.jsonl"


def test_what_was_written_is_read(path: Path) -> None:
    recording = read_recording(path)
    assert recording.header.limits.num_blocks == 64
    assert recording.header.policy == "fcfs"
    kinds = [type(entry) for entry in recording.entries]
    assert kinds[:4] == [Arrival, Launch, Step, Arrival]
    assert [arrival.num_prompt_tokens for arrival in recording.arrivals] == [9, 9]
    assert {number: end.num_output_tokens for number, end in recording.ends.items()} == {0: 4, 1: 2}
    assert len(list(recording.steps)) == 4


def test_a_last_line_that_was_cut_off_is_left_out(path: Path) -> None:
    whole = read_recording(path)
    text = path.read_text()
    path.write_text(text[:-5])
    cut = read_recording(path)
    assert cut.entries == whole.entries[:-1]
    assert isinstance(whole.entries[-1], End)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("not json", "line 2: Expecting value"),
        ("[]", "line 2: "),
        ('{"kind": "song"}', "line 2: kind 'song' is none of arrival,"),
        ('{"kind": "abort"}', "line 2: 'request' is missing"),
        ('{"kind": "abort", "request": "x"}', "line 2: invalid literal"),
        ('{"kind": "step", "step": 1, "end": 0, "seconds": 0, "failed": 3}', "line 2: "),
    ],
)
def test_a_line_that_makes_no_sense_is_named(path: Path, line: str, problem: str) -> None:
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], line, *lines[1:]]) + "\n")
    with pytest.raises(RecordingError, match="run") as refused:
        read_recording(path)
    assert problem in refused.value.message


def test_a_file_that_is_no_recording_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with pytest.raises(RecordingError, match="cannot be read: No such file"):
        read_recording(path)
    path.write_text("")
    with pytest.raises(RecordingError, match="holds no line"):
        read_recording(path)
    path.write_text('{"kind": "abort", "request": 1}\n')
    with pytest.raises(RecordingError, match="line 1: this is no header"):
        read_recording(path)
    path.write_bytes(b"\xff\xfe\n")
    with pytest.raises(RecordingError, match="it is no text"):
        read_recording(path)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"format": 99}, "format 99, this version reads format 1"),
        ({"limits": {"num_wheels": 4}}, "limits that this version does not know: num_wheels"),
        ({"limits": {"num_blocks": 4}}, "'swap_costs' is missing"),
    ],
)
def test_a_header_of_another_version_is_refused(
    path: Path, change: dict[str, object], problem: str
) -> None:
    lines = path.read_text().splitlines()
    header = {**json.loads(lines[0]), **change}
    path.write_text(json.dumps(header) + "\n")
    with pytest.raises(RecordingError, match="line 1") as refused:
        read_recording(path)
    assert problem in refused.value.message
