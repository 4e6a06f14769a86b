from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cb_backend.config import EngineConfig
from cb_backend.engine.controls import explain_requests
from cb_backend.engine.engine import Engine
from cb_backend.engine.recorder import open_recorder
from cb_backend.engine.saved_cache import restore_cache, save_cache
from cb_backend.errors import RecordingError
from cb_backend.planning.recording import read_recording
from cb_backend.planning.replay import Replay, Replayed
from tests.fakes import ShadowExecutor, make_request
from tests.planning.recorded import record_simulation, record_two_requests
from tests.simulation.world import World, draw

Line = dict[str, Any]
NUM_SEEDS = 60


@dataclass(frozen=True)
class Recorded:
    text: str
    num_steps: int


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> list[Recorded]:
    """The simulation's scenarios by seed."""
    folder = tmp_path_factory.mktemp("recorded")
    found = []
    logging.disable(logging.CRITICAL)  # failed steps are part of the play
    for seed in range(NUM_SEEDS):
        path = folder / f"{seed}.jsonl"
        world = record_simulation(seed, path)
        found.append(Recorded(path.read_text(), world.engine.recorder.steps))
    logging.disable(logging.NOTSET)
    return found


def play(path: Path) -> Replayed:
    return Replay(read_recording(path)).play()


def test_every_recorded_simulation_replays_identically(
    recorded: list[Recorded], tmp_path: Path
) -> None:
    path = tmp_path / "run.jsonl"
    for seed, run in enumerate(recorded):
        path.write_text(run.text)
        assert play(path) == Replayed(run.num_steps), f"seed {seed}"


def test_the_recordings_reach_what_they_are_meant_to_reach(recorded: list[Recorded]) -> None:
    lines = [json.loads(line) for run in recorded for line in run.text.splitlines()]
    assert sum(line["kind"] == "abort" for line in lines) > 50
    assert sum(line["kind"] == "change" for line in lines) > 50
    assert sum(line["kind"] == "arrival" and line["fork_of"] is not None for line in lines) > 50
    assert sum(line.get("failed") is True for line in lines) > 50
    assert sum(isinstance(line.get("failed"), list) for line in lines) > 50
    copies = [kind for line in lines for kind, _, _ in line.get("copies", ())]
    assert min(copies.count(kind) for kind in ("in", "out", "fork")) > 50


def change_rows(line: Line) -> bool:
    """Give the first row one token more or less."""
    if not line.get("rows"):
        return False
    row = line["rows"][0]
    line["rows"][0] = [*row[:2], row[2] + 1, *row[3:]] if isinstance(row, list) else [row, 0, 1, 0]
    return True


def change_admitted(line: Line) -> bool:
    return bool(line.pop("admitted", None))


def change_retired(line: Line) -> bool:
    return bool(line.pop("retired", None))


def change_copies(line: Line) -> bool:
    if "copies" in line:
        line["copies"][0][2] += 1
    return "copies" in line


def change_budget(line: Line) -> bool:
    line["budget"] = 1
    return any(isinstance(row, list) and row[2] > 1 for row in line.get("rows", ()))


def change_failed(line: Line) -> bool:
    # Of a step in flight that fell with the one before it, nobody may have been left.
    alone = "rows" in line or line.get("failed") is not True
    return alone and line.pop("failed", None) is not None


@pytest.mark.parametrize(
    "tamper",
    [change_rows, change_admitted, change_retired, change_copies, change_budget, change_failed],
)
def test_a_step_that_was_tampered_with_is_found(
    tamper: Callable[[Line], bool], recorded: list[Recorded], tmp_path: Path
) -> None:
    path, found = tmp_path / "run.jsonl", 0
    for seed, run in enumerate(recorded[:12]):
        lines = [json.loads(line) for line in run.text.splitlines()]
        steps = [line for line in lines if line["kind"] in ("launch", "step")]
        random.Random(seed).shuffle(steps)
        if any(tamper(step) for step in steps):
            path.write_text("".join(json.dumps(line) + "\n" for line in lines))
            assert play(path).difference, f"seed {seed}"
            found += 1
    assert found > 3


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        ("arrival", "prompt", 10),
        ("arrival", "blocks", []),
        ("arrival", "max_tokens", 1),
        ("end", "reason", "abort"),
        ("end", "output", 1),
    ],
)
def test_a_request_that_was_tampered_with_is_found(
    kind: str, field: str, value: object, tmp_path: Path
) -> None:
    path = tmp_path / "run.jsonl"
    record_two_requests(path)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    next(line for line in lines if line["kind"] == kind)[field] = value
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert play(path).difference


def test_the_first_difference_shows_both_decisions(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    record_two_requests(path)
    path.write_text(
        path.read_text().replace('"rows":[[0,0,9,1,0,1,2]]', '"rows":[[0,0,8,1,0,1,2]]')
    )
    assert play(path) == Replayed(
        0,
        "step 1 differs\n"
        'recorded: {"budget":512,"rows":[[0,0,8,1,0,1,2]],"admitted":[0]}\n'
        'replayed: {"budget":512,"rows":[[0,0,9,1,0,1,2]],"admitted":[0]}',
    )


def test_a_missing_end_of_the_recording_is_no_difference(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    record_two_requests(path)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:5]))
    assert play(path) == Replayed(2)


def test_a_recording_that_names_a_stranger_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    record_two_requests(path)
    path.write_text(path.read_text() + '{"kind":"abort","request":7}\n')
    with pytest.raises(RecordingError, match="names request 7 before its arrival"):
        play(path)


def test_a_change_that_this_version_cannot_make_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    record_two_requests(path)
    path.write_text(path.read_text() + '{"kind":"change","what":"gravity","to":"0"}\n')
    with pytest.raises(RecordingError, match="changes 'gravity'"):
        play(path)


@pytest.mark.parametrize("place", ["header", "change"])
def test_a_recording_cannot_name_code_to_run(tmp_path: Path, place: str) -> None:
    path = tmp_path / "run.jsonl"
    record_two_requests(path)
    text = path.read_text()
    if place == "header":
        assert '"policy":"fcfs"' in text
        path.write_text(text.replace('"policy":"fcfs"', '"policy":"os:abort"'))
    else:
        path.write_text(text + '{"kind":"change","what":"policy","to":"os:abort"}\n')
    with pytest.raises(RecordingError, match="'os:abort' is not one of deadline, fair, fcfs"):
        play(path)


def test_asking_what_requests_wait_for_changes_no_decision(tmp_path: Path) -> None:
    class Curious(World):
        def _step(self) -> None:
            explain_requests(self.engine)
            super()._step()

    for seed in range(15):
        path = tmp_path / f"{seed}.jsonl"
        world = Curious(draw(seed), open_recorder(str(path)))
        world.play()
        world.engine.close()
        assert play(path) == Replayed(world.engine.recorder.steps), f"seed {seed}"


class Unreadable(ShadowExecutor):
    """Knows what lies in its file and cannot load it."""

    def saved_digests(self, path: str) -> list[bytes]:
        return [b"gone", b"too"]


@pytest.mark.parametrize(("kind", "cached"), [(ShadowExecutor, 24), (Unreadable, 16)])
def test_prefixes_that_came_from_a_file_are_found_again(
    kind: type[ShadowExecutor], cached: int, tmp_path: Path
) -> None:
    first, path = ShadowExecutor(), tmp_path / "run.jsonl"
    second = kind()
    for executor, name in ((first, None), (second, str(path))):
        config = EngineConfig(model="fake", cache_file="kept", max_num_seqs=1)
        engine = Engine(config, executor, clock=lambda: 0.0, recording=open_recorder(name))
        restore_cache(engine)
        for number in range(3):
            engine.add(make_request(f"r{number}", range(10 + number), max_tokens=2))
        while engine.has_work:
            engine.step()
        save_cache(engine)
        engine.close()
        if kind is ShadowExecutor:
            second.saved = first.saved
    assert engine.stats().cached_tokens == cached
    assert play(path) == Replayed(engine.recorder.steps)
