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


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "gpu.json"
    path.write_text('{"seconds": {"step": 0.01}, "limits": {"num_blocks": 500}}')
    return path


DRAWN = ["--synthetic", "rate=50,requests=40,prompt=10,output=5"]


def test_a_plan_prints_each_number_of_replicas_and_the_answer(
    profile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    targets = ["--ttft-ms", "30", "--itl-ms", "10.5", "--replicas", "1..2"]
    picture = tmp_path / "plan.png"
    plan = ["plan", *DRAWN, "--profile", str(profile), *targets, "--plot", str(picture)]
    assert main(plan) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("trace: 40 requests")
    assert [line.split()[0] for line in lines[4:6]] == ["1", "2"]
    assert lines[-1] == "1 replica holds p95 TTFT <= 30 ms and p95 ITL <= 10.5 ms"
    assert picture.exists()


def test_a_target_that_nobody_holds_is_exit_status_1(
    profile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    targets = ["--ttft-ms", "30", "--itl-ms", "5", "--replicas", "2"]
    assert main(["plan", *DRAWN, "--profile", str(profile), *targets]) == 1
    assert "up to 2 replicas do not hold" in capsys.readouterr().out


def test_a_plan_of_nothing_is_one_line_of_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--ttft-ms", "1", "--itl-ms", "1"]) == 2
    assert capsys.readouterr().err == (
        "error: a plan needs a recording or --synthetic, one of the two\n"
    )


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["plan", "--itl-ms", "1"],
        ["plan", "--ttft-ms", "-1", "--itl-ms", "1"],
        ["plan", "--ttft-ms", "1", "--itl-ms", "1", "--replicas", "3..1"],
        ["replay"],
    ],
)
def test_arguments_that_make_no_sense_are_refused_with_the_usage(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 2
    assert "usage: python -m cb_backend" in capsys.readouterr().err
