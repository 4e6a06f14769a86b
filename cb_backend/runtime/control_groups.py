"""The control groups that this process is in: a container's, or a service's of systemd. Linux; on
other systems there are none. Any thread."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")


def control_groups(
    controller: str, root: Path = _ROOT, membership: Path = _MEMBERSHIP
) -> Iterator[Path]:
    """The folders of the groups whose limits of a `controller` ("cpu", "memory") hold here: the
    process's own and all around it, of version 2 and of version 1. Some may not exist: a container
    sees its own group as the root, whatever its name outside is."""
    try:
        lines = os.fsdecode(membership.read_bytes()).split("\n")  # a name may hold any byte else
    except OSError:
        lines = []
    bases = {"": root, controller: root / controller}
    own = dict(bases)
    for line in lines:  # 0::/path of version 2, 4:cpu,cpuacct:/path of version 1
        match line.split(":", 2):
            case [_, names, path]:
                for name in bases.keys() & names.split(","):
                    own[name] = bases[name] / path.lstrip("/")
    for name, base in bases.items():
        for folder in (own[name], *own[name].parents):
            yield folder
            if folder == base:
                break


def two_numbers_in(folder: Path, *files: str) -> tuple[int, int] | None:
    """What a group's files say of a limit; None if they are not there, or set none."""
    try:
        first, second = (word for file in files for word in (folder / file).read_text().split())
        return int(first), int(second)
    except (OSError, ValueError):  # of the other version, or the word "max"
        return None
