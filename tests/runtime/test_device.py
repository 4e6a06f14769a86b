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
        ("1 2 3", 6),
        (None, 6),
    ],
)
def test_a_container_s_limit_is_kept(
    limit: str | None, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 6)
    if limit is not None:
        (tmp_path / "cpu.max").write_text(limit + "\n")
    assert choose_num_threads(None, [tmp_path]) == expected
    assert choose_num_threads(9, [tmp_path]) == 9


@pytest.mark.parametrize(("quota", "expected"), [("-1", 6), ("250000", 2), ("10000", 1)])
def test_a_limit_of_cgroup_v1_is_kept(
    quota: str, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 6)
    (tmp_path / "cpu.cfs_quota_us").write_text(quota)
    (tmp_path / "cpu.cfs_period_us").write_text("100000")
    assert choose_num_threads(None, [tmp_path / "none", tmp_path]) == expected


@pytest.mark.parametrize("period", ["0", "-100000"])
def test_a_period_of_zero_is_no_limit(
    period: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine did not start: ZeroDivisionError."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 6)
    (tmp_path / "cpu.max").write_text(f"50000 {period}\n")
    assert choose_num_threads(None, [tmp_path]) == 6
