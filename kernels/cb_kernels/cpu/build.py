"""Compiles the C sources into a shared library, once per user, machine and version of them.

The file's name says what it was made from: sources, compiler and the processor's features. It is
moved into place whole, so processes that compile at the same time do not disturb each other, and
ends in a digest of itself, so that a damaged one is compiled again instead of loaded.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

SOURCES = Path(__file__).parent
UNIT = "kernels.c"  # includes the others
# Contraction to fused multiply-adds is gcc's default; clang's is narrower.
FLAGS = ("-O3", "-march=native", "-ffp-contract=fast", "-fopenmp", "-shared", "-fPIC", "-w")
OF_INTEL = "-DOF_INTEL"  # what the sources do otherwise on such a processor; no macro says it
_NOEXEC = getattr(os, "ST_NOEXEC", 0)  # of mounts that nothing is loaded from; told by Linux alone
_DIGEST_BYTES = 32
_SECONDS = 120  # for the compiler; it takes two


class BuildError(Exception):
    """Why there is no library, in words for the log."""


def built_library(folder: Path | None = None) -> Path:
    """The compiled library, from the cache folder where it is there. Raises BuildError."""
    compiler = find_compiler()
    folder = cache_folder() if folder is None else folder
    path = folder / f"cb_kernels-{_key(compiler)}.so"
    if not is_whole(path):
        _build(compiler, path)
    return path


def find_compiler() -> list[str]:
    """The command: $CC with its arguments, or cc, gcc or clang from the path."""
    wanted = os.environ.get("CC", "").strip()
    try:
        commands = [shlex.split(wanted)] if wanted else [["cc"], ["gcc"], ["clang"]]
    except ValueError as error:
        raise BuildError(f"CC is {wanted!r}: {error}") from error
    for name, *arguments in commands:
        if found := shutil.which(name):
            return [found, *arguments]
    raise BuildError(f"there is no C compiler ({wanted or 'cc, gcc, clang'})")


def cache_folder() -> Path:
    """A folder of this user alone: what lies in it is going to be run."""
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        folder = (Path(base) if base else Path.home() / ".cache") / "cb_kernels"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status, mount = folder.stat(), os.statvfs(folder)
    except (OSError, RuntimeError):  # a home that cannot be written, or none
        return Path(tempfile.mkdtemp(prefix="cb_kernels-"))
    unsafe = status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if unsafe or mount.f_flag & _NOEXEC or not os.access(folder, os.W_OK):
        return Path(tempfile.mkdtemp(prefix="cb_kernels-"))
    return folder


def is_whole(path: Path) -> bool:
    """Whether the file is there and its digest is its own."""
    try:
        content = path.read_bytes()
    except OSError:
        return False
    body, digest = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
    return hashlib.sha256(body).digest() == digest


def _key(compiler: list[str]) -> str:
    digest = hashlib.sha256()
    for source in sorted(SOURCES.glob("*.[ch]")):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    status = os.stat(compiler[0])
    digest.update(f"{compiler} {status.st_size} {status.st_mtime_ns} {flags()}".encode())
    digest.update(processor().encode())
    return digest.hexdigest()[:24]


def flags() -> tuple[str, ...]:
    """What this machine's processor is compiled for with."""
    return (*FLAGS, OF_INTEL) if "GenuineIntel" in processor() else FLAGS


def processor() -> str:
    """The maker, and the features that `-march=native` goes by."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    names = ("vendor_id", "model name", "cpu family", "model\t", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(names)}))


def _build(compiler: list[str], path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="build-") as folder:
        output = Path(folder) / path.name
        command = [*compiler, *flags(), str(SOURCES / UNIT), "-o", str(output), "-lm"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise BuildError(f"{compiler[0]} did not run: {error}") from error
        if done.returncode:
            raise BuildError(f"{compiler[0]} failed: {done.stderr.strip()[-300:]}")
        content = output.read_bytes()
        output.write_bytes(content + hashlib.sha256(content).digest())
        os.replace(output, path)
