from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cb_backend.config import EngineConfig
from cb_backend.core.step_io import StepPlan
from cb_backend.engine.controls import resize_kv_pool, use_policy
from cb_backend.engine.engine import Engine
from cb_backend.engine.recorder import open_recorder
from cb_backend.errors import ConfigError
from tests.fakes import ShadowExecutor, make_model_info, make_request

Line = dict[str, Any]


class RecordedEngines:
    """Builds engines that record, and closes them at the end."""

    def __init__(self) -> None:
        self._built: list[Engine] = []

    def __call__(
        self, path: Path, executor: ShadowExecutor | None = None, **settings: object
    ) -> Engine:
        ticks = itertools.count()
        engine = Engine(
            EngineConfig(model="fake", **settings),  # type: ignore[arg-type]
            executor or ShadowExecutor(),
            clock=lambda: float(next(ticks)),
            recording=open_recorder(str(path)),
        )
        self._built.append(engine)
        return engine

    def close(self) -> None:
        for engine in self._built:
            engine.close()


@pytest.fixture
def make_engine() -> Iterator[RecordedEngines]:
    engines = RecordedEngines()
    yield engines
    engines.close()


def lines_of(path: Path, kind: str | None = None) -> list[Line]:
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    return [line for line in lines if kind in (None, line["kind"])]


def run_dry(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


def test_without_a_path_nothing_is_recorded() -> None:
    engine = Engine(EngineConfig(model="fake"), ShadowExecutor(), lambda: 0.0, open_recorder(None))
    engine.add(make_request("a", [1]))
    run_dry(engine)
    engine.close()


def test_a_path_that_cannot_be_written_is_refused_before_the_engine_is_built() -> None:
    with pytest.raises(ConfigError, match="record"):
        open_recorder("/no/such/folder/file")


def test_the_first_line_says_what_the_engine_is(
    tmp_path: Path, make_engine: RecordedEngines
) -> None:
    path = tmp_path / "run.jsonl"
    make_engine(path, policy="fair", tenant_weights={"acme": 2.0}, max_num_seqs=4)
    (header,) = lines_of(path)
    assert header["kind"] == "header"
    assert header["format"] == 1
    assert (header["policy"], header["limits"]["max_num_seqs"]) == ("fair", 4)
    assert header["model"]["num_blocks"] == 64
    assert list(header["tenant_weights"].values()) == [2.0]


def test_a_request_leaves_its_arrival_its_steps_and_its_end(
    tmp_path: Path, make_engine: RecordedEngines
) -> None:
    path = tmp_path / "run.jsonl"
    engine = make_engine(path)
    engine.add(make_request("a", range(9), max_tokens=3, priority=2, arrival_time=0.125))
    run_dry(engine)
    kinds = [line["kind"] for line in lines_of(path)]
    assert kinds == ["header", "arrival", "step", "step", "step", "end"]
    (arrival,) = lines_of(path, "arrival")
    assert (arrival["request"], arrival["time"]) == (0, 0.125)
    assert "id" not in arrival, "it may hold a label of the client's"
    assert (arrival["prompt"], arrival["max_tokens"], arrival["priority"]) == (9, 3, 2)
    assert arrival["deadline"] is None
    assert len(arrival["blocks"]) == 2
    (end,) = lines_of(path, "end")
    assert (end["reason"], end["output"], len(end["blocks"])) == ("length", 3, 1)
    assert [step["rows"] for step in lines_of(path, "step")] == [[[0, 0, 9, 1, 0, 1, 2]], [0], [0]]


def test_equal_beginnings_of_prompts_have_equal_blocks_under_equal_salts(
    tmp_path: Path, make_engine: RecordedEngines
) -> None:
    path = tmp_path / "run.jsonl"
    engine = make_engine(path)
    engine.add(make_request("a", [1, 2, 3, 4, 5, 6, 7, 8]))
    engine.add(make_request("b", [1, 2, 3, 4, 5, 6, 7, 9]))
    engine.add(make_request("c", [1, 2, 3, 4], cache_salt="other"))
    engine.close()
    a, b, c = (line["blocks"] for line in lines_of(path, "arrival"))
    assert a[0] == b[0]
    assert a[1] != b[1]
    assert c[0] not in (a[0], b[0])


def test_two_recordings_of_one_prompt_have_nothing_in_common(
    tmp_path: Path, make_engine: RecordedEngines
) -> None:
    blocks = []
    for name in ("one", "two"):
        engine = make_engine(tmp_path / name)
        engine.add(make_request("a", range(8), tenant="acme"))
        engine.close()
        (arrival,) = lines_of(tmp_path / name, "arrival")
        blocks.append({*arrival["blocks"], arrival["tenant"]})
    assert not blocks[0] & blocks[1]


def test_there_are_no_token_ids_no_salts_and_no_tenants_in_the_file(
    tmp_path: Path, make_engine: RecordedEngines
) -> None:
    path = tmp_path / "run.jsonl"
    engine = make_engine(path, policy="fair", tenant_weights={"TENANT": 1.0})
    prompt = range(700_001, 700_012)  # then what ShadowExecutor counts on from: 13 and up
    request = make_request(
        "a", prompt, stop_token_ids=[700_099], cache_salt="SALT", tenant="TENANT"
    )
    engine.add(request)
    run_dry(engine)
    engine.close()
    text = path.read_text()
    assert not [word for word in ("7000", "SALT", "TENANT") if word in text]
    # What lists of numbers there are: of blocks, of requests and of rows, all far below the ids.
    assert len(request.token_ids) == 19
    for line in lines_of(path, "step"):
        for row in line["rows"]:
            assert max(row if isinstance(row, list) else [row]) < 64


def test_a_refused_request_is_noted_without_a_number(
    tmp_path: Path, make_engine: RecordedEngines
) -> None:
    path = tmp_path / "run.jsonl"
    engine = make_engine(path, ShadowExecutor(make_model_info(num_blocks=2, block_size=4)))
    engine.add(make_request("big", range(9)))
    engine.add(make_request("a", [1], max_tokens=1))
    run_dry(engine)
    (refused,) = lines_of(path, "refused")
    assert (refused["prompt"], refused["code"]) == (9, "context_length_exceeded")
    assert [line["request"] for line in lines_of(path, "arrival")] == [0]
    assert [line["request"] for line in lines_of(path, "end")] == [0]


def test_an_abort_is_noted_once_and_only_of_who_lives(
    tmp_path: Path, make_engine: RecordedEngines
) -> None:
    path = tmp_path / "run.jsonl"
    engine = make_engine(path)
    engine.add(make_request("a", [1]))
    engine.step()
    for name in ("a", "a", "unknown"):
        engine.abort(name)
    assert [line["kind"] for line in lines_of(path)][-2:] == ["abort", "end"]
    assert lines_of(path, "end")[0]["reason"] == "abort"
    assert len(lines_of(path, "abort")) == 1


def test_failed_steps_and_failed_rows_are_noted(
    tmp_path: Path, make_engine: RecordedEngines
) -> None:
    def explode_first(plan: StepPlan) -> None:
        if plan.step == 1:
            raise RuntimeError

    path = tmp_path / "run.jsonl"
    executor = ShadowExecutor(before_step=explode_first)
    engine = make_engine(path, executor)
    engine.add(make_request("a", [1]))
    engine.step()
    executor.fail_rows.add("b")
    engine.add(make_request("b", [1]))
    engine.step()
    assert [step["failed"] for step in lines_of(path, "step")] == [True, [1]]


def test_a_change_of_policy_or_pool_is_noted(tmp_path: Path, make_engine: RecordedEngines) -> None:
    path = tmp_path / "run.jsonl"
    engine = make_engine(path)
    use_policy(engine, "fair")
    resize_kv_pool(engine, 70)
    engine.close()
    assert lines_of(path, "change") == [
        {"kind": "change", "what": "policy", "to": "fair"},
        {"kind": "change", "what": "num_blocks", "to": 70},
    ]


def test_what_lives_when_the_engine_closes_is_written_without_a_reason(
    tmp_path: Path, make_engine: RecordedEngines
) -> None:
    path = tmp_path / "run.jsonl"
    engine = make_engine(path)
    engine.add(make_request("a", [1], deadline=math.inf))
    engine.step()
    engine.step()
    engine.close()
    (end,) = lines_of(path, "end")
    assert (end["reason"], end["output"]) == (None, 2)


def test_the_file_is_complete_whenever_nothing_lives(
    tmp_path: Path, make_engine: RecordedEngines
) -> None:
    path = tmp_path / "run.jsonl"
    engine = make_engine(path)
    for name in "abc":
        engine.add(make_request(name, [1], max_tokens=2))
        run_dry(engine)
        assert lines_of(path)[-1]["kind"] == "end"


def test_the_numbers_of_ended_requests_are_forgotten(
    tmp_path: Path, make_engine: RecordedEngines
) -> None:
    engine = make_engine(tmp_path / "run.jsonl")
    for number in range(50):
        engine.add(make_request(f"r{number}", [1], max_tokens=2))
        run_dry(engine)
    assert len(engine.recording._numbers) <= 1  # type: ignore[attr-defined]
