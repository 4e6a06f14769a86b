"""Int8 keeps its promise of quality on the default model."""

from __future__ import annotations

import pytest
from perplexity import measured, windows_of

from cb_backend.config import EngineConfig
from tests.e2e.serving_process import default_model

WINDOWS = 3
BOUND = 0.02  # README: less than 2% more perplexity

pytestmark = pytest.mark.timeout(300)


def test_perplexity_rises_by_less_than_the_stated_bound() -> None:
    settings = EngineConfig(model=default_model(), device="cpu")
    found = measured(settings, windows_of(settings.model, WINDOWS))
    assert 2 < found["none"] < 30, "the text is read"
    assert found["int8"] != found["none"]
    assert found["int8"] / found["none"] - 1 < BOUND
