"""A program that ends without closing its engine, or without waiting for its end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.serving_process import PROJECT
from tests.e2e.tiny_model import write_tiny_model

PROGRAM = """
import asyncio, os, sys
from cb_backend.config import EngineConfig
from cb_backend.core.sampling_params import SamplingParams
from cb_backend.factory import create_engine
from cb_backend.serving.engine_client import GenerateRequest

async def main():
    engine = create_engine(EngineConfig(model=sys.argv[1], kv_cache_gib=0.25, num_threads=1))
    while not engine.is_ready:
        assert engine.is_alive, engine.status_text
        await asyncio.sleep(0.01)
    params = SamplingParams(max_tokens=60_000, ignore_eos=True)
    (stream,) = engine.open(GenerateRequest(prompt_token_ids=[5] * 16, params=params))
    async for event in stream:
        return engine, stream

kept = asyncio.run(main())
child = os.fork()
if child == 0:
    sys.exit()  # has the engine, but not its thread: nothing to wait for
assert os.waitpid(child, 0)[1] == 0
print("leaving")
"""


LOADING = """
import sys, time
from cb_backend.config import EngineConfig
from cb_backend.factory import create_engine
kept = create_engine(EngineConfig(model=sys.argv[1], kv_cache_gib=0.25, num_threads=1))
while "cb_backend.runtime.model_runner" not in sys.modules:
    time.sleep(0.001)
time.sleep(float(sys.argv[2]))
print("leaving")
"""

STOPPED = """
import sys, time
from cb_backend.config import EngineConfig
from cb_backend.factory import create_engine

kept = create_engine(
    EngineConfig(model=sys.argv[1], kv_cache_gib=0.25, num_threads=1, cache_file=sys.argv[2])
)
while not kept.is_ready:
    time.sleep(0.001)
kept.start_drain()
while "stopped" not in kept.status_text:
    pass
print("leaving")
"""


def leave(program: str, *arguments: str, c_kernels: str = "1") -> str:
    """Runs a program that says so before it ends; what it wrote to stderr, if its end is a good
    one."""
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, *arguments],
        cwd=PROJECT,
        env=os.environ | {"CBKERNELS_C": c_kernels},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (0, "leaving\n"), ended.stderr
    return ended.stderr


@pytest.mark.parametrize("c_kernels", ["0", "1"])
def test_a_program_ends_while_a_request_runs(c_kernels: str, tmp_path: Path) -> None:
    """It was aborted ("terminate called without an active exception") in most such moments."""
    model = write_tiny_model(tmp_path / "tiny")
    for _ in range(4):
        assert leave(PROGRAM, str(model), c_kernels=c_kernels) == ""


@pytest.mark.parametrize("after_s", ["0", "0.2", "0.8"])
def test_a_program_ends_while_its_model_loads(after_s: str, tmp_path: Path) -> None:
    """It was aborted as well. torch's own import may complain of the interpreter's end."""
    model = write_tiny_model(tmp_path / "tiny")
    assert "engine" not in leave(LOADING, str(model), after_s)


def test_a_program_ends_as_soon_as_its_engine_has_stopped(tmp_path: Path) -> None:
    """What it had cached was not saved."""
    file = tmp_path / "cache"
    model = write_tiny_model(tmp_path / "tiny")
    assert leave(STOPPED, str(model), str(file)) == ""
    assert [path.name for path in tmp_path.glob("cache*")] == ["cache"]
