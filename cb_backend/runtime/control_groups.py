"""The control groups that this process is in: a container's, or a service's of systemd. Linux; on
other systems there are none. Any thread."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

_MOUNTS = Path("/proc/self/mountinfo")
_MEMBERSHIP = Path("/proc/self/cgroup")


def control_groups(
    controller: str, mounts: Path = _MOUNTS, membership: Path = _MEMBERSHIP
) -> Iterator[Path]:
    """The folders of the groups whose limits of a `controller` ("cpu", "memory") hold here: the
    process's own and all around it that are shown, of version 2 and of version 1. Some may not
    exist: what is mounted need not show the process's own."""
    own = {}
    for line in _lines(membership):  # 0::/path of version 2, 4:cpu,cpuacct:/path of version 1
        match line.split(":", 2):
            case [_, names, path]:
                own.update(dict.fromkeys(names.split(","), path))
    for name, top, base in _hierarchies(controller, mounts):
        folder = base / own.get(name, top).removeprefix(top).lstrip("/")
        for group in (folder, *folder.parents):
            yield group
            if group == base:
                break


def two_numbers_in(folder: Path, *files: str) -> tuple[int, int] | None:
    """What a group's files say of a limit; None if they are not there, or set none."""
    try:
        first, second = (word for file in files for word in (folder / file).read_text().split())
        return int(first), int(second)
    except (OSError, ValueError):  # of the other version, or the word "max"
        return None


def _hierarchies(controller: str, mounts: Path) -> Iterator[tuple[str, str, Path]]:
    """Of each that may limit a controller: by which name a membership tells it, which group is its
    topmost here, and the folder of that."""
    for line in _lines(mounts):
        match line.split(" "):  # of a mount: ..., what of it, where, ..., type, source, options
            case [_, _, _, top, folder, *_, "cgroup2", _, _]:
                yield "", _unescaped(top), Path(_unescaped(folder))
            case [_, _, _, top, folder, *_, "cgroup", _, options]:
                if controller in options.split(","):
                    yield controller, _unescaped(top), Path(_unescaped(folder))


def _lines(file: Path) -> list[str]:
    try:
        return os.fsdecode(file.read_bytes()).split("\n")  # a name may hold any byte else
    except OSError:
        return []


def _unescaped(word: str) -> str:
    r"""What is written as \040, since a space ends a word."""
    return re.sub(r"\\([01][0-7]{2})", lambda code: chr(int(code[1], 8)), word)
