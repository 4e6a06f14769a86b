"""How many CPU threads compute a step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cb_backend.runtime.device import choose_num_threads


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        ("max 100000", 6),
        ("800000 100000", 6),
        ("400000 100000", 4),
        ("350000 100000", 3),  # three that run all the time rather than four that are stopped
        ("50000 100000", 1),
        ("", 6),
        (None, 6),
    ],
)
def test_a_container_s_limit_is_kept(
    limit: str | None, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 6)
    if limit is not None:
        (tmp_path / "cpu.max").write_text(limit + "\n")
    assert choose_num_threads(None, tmp_path) == expected
    assert choose_num_threads(9, tmp_path) == 9
