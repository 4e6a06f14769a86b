from __future__ import annotations

import argparse
import sys

import pytest
from turns import Contestant, add_repeat, ratio_text

DOUBLES = """
import json, sys
print("noise"); print("READY", flush=True)
for line in sys.stdin:
    print("RESULT", json.dumps({"twice": 2 * json.loads(line)["number"]}), flush=True)
"""


def test_a_ratio_is_told_by_its_median_turn_and_its_spread() -> None:
    # Of the turns: 1.0, 2.0 and 4.0; of the sums it would be 1.4.
    assert ratio_text([10.0, 2.0, 4.0], [10.0, 1.0, 1.0]) == "2.00 (1.00 to 4.00)"


def test_a_contestant_answers_each_run_although_it_is_stopped_between_them() -> None:
    contestant = Contestant("test-turns", [sys.executable, "-c", DOUBLES])
    try:
        contestant.load()
        assert [contestant.run(number=n)["twice"] for n in (1, 2, 3)] == [2, 4, 6]
    finally:
        contestant.close()


@pytest.mark.parametrize(
    ("text", "said"), [("0", "must be at least 1, got 0"), ("-2", "got -2"), ("x", "'x'")]
)
def test_no_turns_are_refused_before_anything_starts(
    text: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """bench_roofline.py loaded the model, and failed at the median of nothing."""
    parser = argparse.ArgumentParser()
    add_repeat(parser, 3, "turns")
    with pytest.raises(SystemExit):
        parser.parse_args(["--repeat", text])
    message = capsys.readouterr().err
    assert "argument --repeat: " in message
    assert said in message
    assert parser.parse_args([]).repeat == 3
