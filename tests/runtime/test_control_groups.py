"""A limit holds for all that are in a group, however deep, and wherever its files are."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cb_backend.runtime.control_groups import control_groups

# The folders where hierarchies are mounted, and their controllers: those of version 2 have none.
V2 = {".": ""}
V1 = {"cpu,cpuacct": "cpu,cpuacct", "memory": "memory", "systemd": "name=systemd"}
HYBRID = {**V1, "unified": ""}


def _mounts(root: Path, hierarchies: dict[str, str], group: str = "/") -> Path:
    """A file of the kernel's, of mounts that show a hierarchy from `group` on."""
    lines = ["22 1 8:1 / / rw,relatime - ext4 /dev/root rw,memory"]
    for name, controllers in hierarchies.items():
        folder = str(root / name).replace(" ", "\\040")
        kind = "cgroup rw," + controllers if controllers else "cgroup2 rw,nsdelegate"
        lines.append(f"32 31 0:29 {group} {folder} rw,nosuid shared:9 - {kind.split()[0]} {kind}")
    file = root / "mounts"
    file.write_text("\n".join([*lines, "garbage", ""]))
    return file


@pytest.mark.parametrize(
    ("membership", "expected"),
    [
        ("0::/system.slice/llm.service\n", ["system.slice/llm.service", "system.slice", "."]),
        ("0::/\n", ["."]),  # what a container sees of itself
        ("", ["."]),
        (None, ["."]),
    ],
)
def test_the_groups_of_version_2_reach_from_one_s_own_to_the_root(
    membership: str | None, expected: list[str], tmp_path: Path
) -> None:
    """A service of systemd with MemoryMax took its pool from all of the machine's memory."""
    file = tmp_path / "membership"
    if membership is not None:
        file.write_text(membership)
    found = list(control_groups("memory", _mounts(tmp_path, V2), file))
    assert found == [tmp_path / name for name in expected]


def test_the_groups_of_version_1_are_each_controller_s_own(tmp_path: Path) -> None:
    """Where the folder is cpu,cpuacct and no link says cpu, the limit was not found."""
    file, mounts = tmp_path / "membership", _mounts(tmp_path, V1)
    file.write_text("5:cpuacct,cpu:/a/b\n4:memory:/docker/1f:2\n1:name=systemd:/c\n0::/d\n")
    cpu, memory = tmp_path / "cpu,cpuacct", tmp_path / "memory"
    assert list(control_groups("cpu", mounts, file)) == [cpu / "a" / "b", cpu / "a", cpu]
    assert next(control_groups("memory", mounts, file)) == memory / "docker" / "1f:2"


def test_the_groups_of_version_2_are_found_beside_those_of_version_1(tmp_path: Path) -> None:
    """Where it is mounted as /sys/fs/cgroup/unified, its limits were not found."""
    file, mounts = tmp_path / "membership", _mounts(tmp_path, HYBRID)
    file.write_text("4:memory:/a\n0::/d\n")
    folders = ("memory/a", "memory", "unified/d", "unified")
    assert list(control_groups("memory", mounts, file)) == [tmp_path / name for name in folders]


def test_a_container_is_shown_its_own_group_under_the_name_that_it_has_outside(
    tmp_path: Path,
) -> None:
    file, mounts = tmp_path / "membership", _mounts(tmp_path, V1, "/docker/1f\\040x")
    file.write_text("4:memory:/docker/1f x/worker\n")
    memory = tmp_path / "memory"
    assert list(control_groups("memory", mounts, file)) == [memory / "worker", memory]


def test_a_hierarchy_may_be_mounted_in_a_folder_of_any_name(tmp_path: Path) -> None:
    mounts = _mounts(tmp_path, {"my groups\\134": ""})
    assert list(control_groups("cpu", mounts, tmp_path / "none")) == [tmp_path / "my groups\\"]


@pytest.mark.parametrize("name", [b"caf\xe9", "a\u2028b\x85c\x0cd".encode(), b"a b:c"])
def test_a_group_may_have_any_name(name: bytes, tmp_path: Path) -> None:
    """The engine did not start in such a group."""
    file = tmp_path / "membership"
    file.write_bytes(b"garbage\n\n0::/" + name + b"\n")
    found = control_groups("cpu", _mounts(tmp_path, V2), file)
    assert next(found) == tmp_path / os.fsdecode(name)


def test_a_group_outside_of_what_is_seen_leads_to_the_root(tmp_path: Path) -> None:
    file = tmp_path / "membership"
    file.write_text("0::/../other\n")
    assert list(control_groups("cpu", _mounts(tmp_path, V2), file))[-1] == tmp_path


def test_where_no_mounts_are_told_there_are_no_groups(tmp_path: Path) -> None:
    assert list(control_groups("cpu", tmp_path / "none", tmp_path / "none")) == []
