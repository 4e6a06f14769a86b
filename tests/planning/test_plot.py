from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from cb_backend.errors import ConfigError
from cb_backend.planning.capacity import Prediction, Target

PREDICTIONS = [
    Prediction(n, {50: 0.1, 95: 0.4 / n, 99: 1.0}, {50: 0.01, 95: 0.02, 99: 0.1}, 9.0, 20.0)
    for n in (1, 2, 3)
]
TARGET = Target(0.3, 0.05)


def test_the_picture_is_a_png(tmp_path: Path) -> None:
    plot = importlib.import_module("cb_backend.planning.plot")
    plot.draw(tmp_path / "plan.png", PREDICTIONS, TARGET)
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG\r\n")


def test_a_picture_that_cannot_be_written_is_an_error_in_words(tmp_path: Path) -> None:
    plot = importlib.import_module("cb_backend.planning.plot")
    with pytest.raises(ConfigError, match="cannot be written: No such file"):
        plot.draw(tmp_path / "absent" / "plan.png", PREDICTIONS, TARGET)


def test_without_matplotlib_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.delitem(sys.modules, "cb_backend.planning.plot", raising=False)
    with pytest.raises(ConfigError, match=r"pip install 'cb-backend\[plan\]'"):
        importlib.import_module("cb_backend.planning.plot")
