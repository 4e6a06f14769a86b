from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import record


def test_percentiles_lie_between_values_and_there_are_none_of_nothing() -> None:
    assert record.percentiles([1.0, 2.0])["p50"] == pytest.approx(1.5)
    values = list(np.random.default_rng(0).normal(size=101))
    assert record.percentiles(values)["p95"] == pytest.approx(sorted(values)[95])
    assert record.percentiles([]) == {}


def test_a_line_has_the_settings_without_the_secret_and_lines_are_appended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "RESULTS", tmp_path / "results")
    monkeypatch.setenv("CB_NUM_THREADS", "2")
    monkeypatch.setenv("CB_ADMIN_KEY", "hush")
    for number in (1, 2):
        file = record.append("x", {"number": number})
    assert "hush" not in file.read_text()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["number"] for line in lines] == [1, 2]
    assert lines[0]["settings"]["CB_NUM_THREADS"] == "2"
    assert {"time", "commit", "machine", "versions"} <= set(lines[0])
