from __future__ import annotations

import json
from pathlib import Path

import pytest

from cb_backend.errors import ConfigError, RecordingError
from cb_backend.planning.cost_model import CostModel
from cb_backend.planning.plan_inputs import MEASURED, plan_inputs
from cb_backend.planning.trace import Synthetic
from tests.planning.priced import serve_priced


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    trace = Synthetic(requests=20, rate=4.0, prompt=(1, 40), output=(1, 20)).draw(4)
    serve_priced(trace, CostModel((0.02, 0.001, 0.0, 0.0, 0.0)), tmp_path / "run.jsonl")
    return tmp_path / "run.jsonl"


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "gpu.json"
    path.write_text(
        json.dumps({"seconds": {"step": 0.004}, "limits": {"num_blocks": 90, "block_size": 8}})
    )
    return path


def test_a_recording_brings_its_trace_its_limits_and_its_costs(recording: Path) -> None:
    inputs = plan_inputs(recording, None, MEASURED)
    assert len(inputs.trace.requests) == 20
    assert inputs.header.limits.num_blocks == 256
    assert inputs.cost.seconds[:2] == pytest.approx((0.02, 0.001), rel=0.02)


def test_a_profile_replaces_the_costs_and_the_limits_that_it_names(
    recording: Path, profile: Path
) -> None:
    inputs = plan_inputs(recording, None, str(profile))
    assert inputs.cost.seconds == (0.004, 0.0, 0.0, 0.0, 0.0)
    limits = inputs.header.limits
    assert (limits.num_blocks, limits.block_size, limits.max_num_seqs) == (90, 8, 4)
    assert inputs.trace.block_size == 4  # in which its prefixes are described


def test_a_drawn_trace_takes_a_profile_of_either_kind(recording: Path, profile: Path) -> None:
    by_prices = plan_inputs(None, "rate=3,requests=5", str(profile))
    assert len(by_prices.trace.requests) == 5
    assert (by_prices.header.limits.num_blocks, by_prices.header.limits.max_num_seqs) == (90, 64)
    by_recording = plan_inputs(None, "rate=3,requests=5", str(recording))
    assert by_recording.header.limits.num_blocks == 256


def test_what_makes_no_plan_is_refused(recording: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a recording or --synthetic"):
        plan_inputs(None, None, MEASURED)
    with pytest.raises(ConfigError, match="a recording or --synthetic"):
        plan_inputs(recording, "rate=1", MEASURED)
    with pytest.raises(ConfigError, match="--synthetic needs --profile"):
        plan_inputs(None, "rate=1", MEASURED)
    with pytest.raises(RecordingError, match="is no profile"):
        plan_inputs(recording, None, str(tmp_path / "absent.json"))


@pytest.mark.parametrize(
    ("limits", "problem"),
    [({"num_wheels": 4}, "limits num_wheels"), ({}, "how many num_blocks")],
)
def test_a_profile_with_wrong_limits_is_refused(
    limits: dict[str, int], problem: str, tmp_path: Path
) -> None:
    path = tmp_path / "gpu.json"
    path.write_text(json.dumps({"seconds": {"step": 1}, "limits": limits}))
    with pytest.raises(RecordingError, match=problem):
        plan_inputs(None, "rate=1", str(path))
