"""The workers of a decoder's call under ThreadSanitizer: see race_driver.c.

OpenMP's runtime is not compiled for it and would be full of races, so the driver calls nothing that
has a parallel region.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from cb_kernels.cpu import build

from tests.needs import needs_pairs

pytestmark = needs_pairs
DRIVER = Path(__file__).with_name("race_driver.c")
FLAGS = ("-Og", "-g", "-march=native", "-fopenmp", "-w", "-fsanitize=thread")
SECONDS = 50

# File, what it says, and what it would say with a bug.
PLANTED = {
    "what a member did is not seen with its being done": (
        "team.h",
        "t->finished, memory_order_acq_rel",
        "t->finished, memory_order_relaxed",
    ),
    "a stage under way counts as done": (
        "team.h",
        "m->stage++ < reached",
        "m->stage++ <= reached",
    ),
    "a call ends before its workers leave it": (
        "workers.c",
        "for (int looks = 0; atomic_load(&call->inside);) pause_a_little(&looks);",
        "",
    ),
}


@pytest.fixture(name="compiler", scope="module")
def _compiler(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """One that has a sanitizer which runs here."""
    compiler, folder = build.find_compiler(), tmp_path_factory.mktemp("probe")
    (folder / "probe.c").write_text("int main(void) { return 0; }")
    command = [*compiler, *FLAGS, str(folder / "probe.c"), "-o", str(folder / "probe")]
    for step in (command, [str(folder / "probe")]):
        done = subprocess.run(step, capture_output=True, text=True, timeout=SECONDS)
        if done.returncode:
            pytest.skip(f"no ThreadSanitizer with {compiler[0]}: {done.stderr.strip()[-200:]}")
    return compiler


def compiled(compiler: list[str], sources: Path, folder: Path) -> Path:
    path = folder / "race_driver"
    command = [*compiler, *FLAGS, f"-I{sources}", str(DRIVER), "-o", str(path), "-lm"]
    subprocess.run(command, check=True, timeout=SECONDS)
    return path


def run(driver: Path, *, seed: int, callers: int, steps: int) -> subprocess.CompletedProcess[str]:
    options = "halt_on_error=1 atexit_sleep_ms=0"
    return subprocess.run(
        [str(driver), str(seed), str(callers), str(steps)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
        env={**os.environ, "TSAN_OPTIONS": options},
    )


def test_callers_and_workers_do_not_race(compiler: list[str], tmp_path: Path) -> None:
    driver = compiled(compiler, build.SOURCES, tmp_path)
    for seed, callers in enumerate((1, 2, 3)):
        done = run(driver, seed=seed, callers=callers, steps=60)
        assert "WARNING: ThreadSanitizer" not in done.stdout, done.stdout
        assert (done.returncode, done.stdout) == (0, f"0 of {callers * 60} steps are wrong\n")


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_race_is_found(name: str, compiler: list[str], tmp_path: Path) -> None:
    file, text, planted = PLANTED[name]
    sources = Path(shutil.copytree(build.SOURCES, tmp_path / "sources"))
    before = (sources / file).read_text()
    assert before.count(text) == 1
    (sources / file).write_text(before.replace(text, planted))
    done = run(compiled(compiler, sources, tmp_path), seed=1, callers=2, steps=100)
    assert done.returncode
    assert "WARNING: ThreadSanitizer" in done.stdout or "steps are wrong" in done.stdout
