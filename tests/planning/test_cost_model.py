from __future__ import annotations

import json
from pathlib import Path

import pytest

from cb_backend.errors import RecordingError
from cb_backend.planning.cost_model import FEATURES, CostModel, StepWork, fit, read_profile
from cb_backend.planning.recording import read_recording
from cb_backend.planning.trace import Synthetic
from tests.planning.priced import serve_priced
from tests.planning.recorded import record_two_requests


def test_the_work_of_a_step_is_counted_over_its_rows() -> None:
    work = StepWork.of([(0, 4, True), (10, 1, True), (3, 2, False)])
    assert work == StepWork(
        step=1,
        tokens=7,
        sampling_rows=2,
        context_tokens=4 + 11 + 5,
        attention_pairs=(1 + 2 + 3 + 4) + 11 + (4 + 5),
    )


def test_a_step_costs_the_sum_of_its_work_at_its_prices() -> None:
    cost = CostModel((1.0, 0.5, 0.25, 0.125, 0.0625))
    assert cost.step_seconds(StepWork(1, 2, 4, 8, 16)) == 5.0


PRICES = {
    "all": (0.02, 0.001, 0.0005, 1e-5, 2e-6),
    "no attention": (0.02, 0.001, 0.0005, 0.0, 0.0),
    "tokens alone": (0.0, 0.001, 0.0, 0.0, 0.0),
}


@pytest.mark.parametrize("prices", PRICES.values(), ids=PRICES)
def test_prices_are_found_again_in_what_they_made(
    prices: tuple[float, ...], tmp_path: Path
) -> None:
    path = tmp_path / "run.jsonl"
    trace = Synthetic(requests=60, rate=10.0, prompt=(1, 90), output=(1, 30)).draw(4)
    serve_priced(trace, CostModel(prices), path)
    found = fit(read_recording(path))
    # Recorded seconds are rounded to a microsecond.
    assert found.seconds == pytest.approx(prices, rel=0.02, abs=1e-6)
    assert min(found.seconds) >= 0
    assert found.spread == pytest.approx([1.0] * len(found.spread), abs=0.01)
    assert found.between_s == pytest.approx(0.0, abs=1e-5)


def test_a_few_steps_are_not_fitted_to(tmp_path: Path) -> None:
    record_two_requests(tmp_path / "run.jsonl")
    with pytest.raises(RecordingError, match="4 recorded steps are too few"):
        fit(read_recording(tmp_path / "run.jsonl"))


def test_a_profile_prices_what_it_names_and_limits_what_it_wants(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    path.write_text(
        json.dumps({"seconds": {"step": 0.004, "tokens": 2e-5}, "limits": {"num_blocks": 9}})
    )
    cost, limits = read_profile(path)
    assert dict(zip(FEATURES, cost.seconds, strict=True)) == {
        "step": 0.004,
        "tokens": 2e-5,
        "sampling_rows": 0.0,
        "context_tokens": 0.0,
        "attention_pairs": 0.0,
    }
    assert limits == {"num_blocks": 9}
    assert "gpu.json" in cost.source


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("nothing", "no profile"),
        ("[]", "no profile"),
        ("{}", "no profile: 'seconds'"),
        ('{"seconds": {"step": "slow"}}', "no profile"),
        ('{"seconds": {"wheels": 1}}', "prices wheels; known are step, tokens"),
        ('{"seconds": {"step": -1}}', "numbers of 0 or more"),
        ('{"seconds": {}}', "must price its steps"),
    ],
)
def test_a_profile_that_makes_no_sense_is_refused(text: str, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    path.write_text(text)
    with pytest.raises(RecordingError) as refused:
        read_profile(path)
    assert problem in refused.value.message
