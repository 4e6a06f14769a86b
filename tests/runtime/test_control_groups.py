"""A limit holds for all that are in a group, however deep."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cb_backend.runtime.control_groups import control_groups


@pytest.mark.parametrize(
    ("membership", "of_memory"),
    [
        ("0::/system.slice/llm.service\n", ["system.slice/llm.service", "system.slice", "."]),
        ("0::/\n", ["."]),  # what a container sees of itself
        ("", ["."]),
        (None, ["."]),
    ],
)
def test_the_groups_of_version_2_reach_from_one_s_own_to_the_root(
    membership: str | None, of_memory: list[str], tmp_path: Path
) -> None:
    """A service of systemd with MemoryMax took its pool from all of the machine's memory."""
    file, root = tmp_path / "membership", tmp_path / "root"
    if membership is not None:
        file.write_text(membership)
    found = list(control_groups("memory", root, file))
    assert found == [*(root / name for name in of_memory), root / "memory"]


def test_the_groups_of_version_1_are_each_controller_s_own(tmp_path: Path) -> None:
    file, root = tmp_path / "membership", tmp_path / "root"
    file.write_text("5:cpu,cpuacct:/a/b\n4:memory:/docker/1f:2\n1:name=systemd:/c\n0::/d\n")
    assert list(control_groups("cpu", root, file)) == [
        *(root / "d", root),
        *(root / "cpu" / "a" / "b", root / "cpu" / "a", root / "cpu"),
    ]
    assert root / "memory" / "docker" / "1f:2" in set(control_groups("memory", root, file))


@pytest.mark.parametrize("name", [b"caf\xe9", "a\u2028b\x85c\x0cd".encode(), b"a b:c"])
def test_a_group_may_have_any_name(name: bytes, tmp_path: Path) -> None:
    """The engine did not start in such a group."""
    file, root = tmp_path / "membership", tmp_path / "root"
    file.write_bytes(b"garbage\n\n0::/" + name + b"\n")
    assert next(control_groups("cpu", root, file)) == root / os.fsdecode(name)


def test_a_group_outside_of_what_is_seen_leads_to_the_root(tmp_path: Path) -> None:
    file, root = tmp_path / "membership", tmp_path / "root"
    file.write_text("0::/../other\n")
    assert list(control_groups("cpu", root, file))[-2:] == [root, root / "cpu"]
