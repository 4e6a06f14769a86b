from __future__ import annotations

from pathlib import Path

import pytest

from cb_backend.__main__ import main
from tests.planning.recorded import record_two_requests


@pytest.fixture
def path(tmp_path: Path) -> Path:
    record_two_requests(tmp_path / "run.jsonl")
    return tmp_path / "run.jsonl"


def test_a_replay_without_a_difference_says_how_many_steps_it_compared(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(path)]) == 0
    assert capsys.readouterr().out == "4 steps identical\n"


def test_a_replay_with_a_difference_prints_both_decisions(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path.write_text(path.read_text().replace('"rows":[0,', '"rows":[1,'))
    assert main(["replay", str(path)]) == 1
    printed = capsys.readouterr().out
    assert printed.startswith("1 steps identical, then step 2 differs\nrecorded: ")
    assert "\nreplayed: " in printed


def test_a_file_that_cannot_be_read_is_one_line_of_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(tmp_path / "absent")]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == f"error: {tmp_path}/absent cannot be read: No such file or directory\n"
