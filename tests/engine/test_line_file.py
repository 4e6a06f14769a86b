from __future__ import annotations

import errno
import logging
from pathlib import Path

import pytest

from cb_backend.engine.line_file import LineFile, open_new
from cb_backend.errors import ConfigError


def test_lines_reach_the_file_when_they_are_flushed(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    lines = open_new(str(path))
    lines.append("one")
    lines.append("two")
    assert path.read_text() == ""
    lines.flush()
    assert path.read_text() == "one\ntwo\n"
    lines.append("three")
    lines.close()
    assert path.read_text() == "one\ntwo\nthree\n"


def test_a_full_buffer_goes_out_by_itself(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    lines = open_new(str(path))
    lines.append("x" * 70_000)
    assert path.stat().st_size == 70_001
    lines.close()


def test_a_file_that_exists_is_kept_and_the_next_free_name_is_taken(tmp_path: Path) -> None:
    for _ in range(3):
        lines = open_new(str(tmp_path / "run.jsonl"))
        lines.append("a line")
        lines.close()
    assert {path.name for path in tmp_path.iterdir()} == {
        "run.jsonl",
        "run-2.jsonl",
        "run-3.jsonl",
    }


@pytest.mark.parametrize("name", ["no/such/folder/run.jsonl", "zero\0byte"])
def test_a_path_that_cannot_be_written_is_a_config_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"record names the file .* cannot be written") as refused:
        open_new(str(tmp_path / name))
    assert refused.value.field == "record"


class _FullDisk:
    """Takes a few bytes, then no more."""

    name = "full"

    def __init__(self) -> None:
        self.taken = 0
        self.closed = 0

    def write(self, data: memoryview) -> int:
        if self.taken >= 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.taken += 4
        return 4

    def close(self) -> None:
        self.closed += 1


def test_a_full_disk_stops_the_lines_with_one_word_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    disk = _FullDisk()
    lines = LineFile(disk)  # type: ignore[arg-type]
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            lines.append("a line")
            lines.flush()
        lines.close()
    assert [record.message for record in caplog.records] == [
        "recording stops: full cannot be written: [Errno 28] No space left on device"
    ]
    assert disk.closed == 1
