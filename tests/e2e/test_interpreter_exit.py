"""A program that ends without closing its engine, while a request runs."""

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


@pytest.mark.parametrize("c_kernels", ["0", "1"])
def test_a_program_ends_while_a_request_runs(c_kernels: str, tmp_path: Path) -> None:
    """It was aborted ("terminate called without an active exception") in most such moments."""
    model = write_tiny_model(tmp_path / "tiny")
    for _ in range(4):
        ended = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", PROGRAM, str(model)],
            cwd=PROJECT,
            env=os.environ | {"CBKERNELS_C": c_kernels},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert (ended.returncode, ended.stdout, ended.stderr) == (0, "leaving\n", "")
