"""The examples are programs that run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.serving_process import PROJECT, environment, serving
from tests.e2e.tiny_model import write_tiny_model

pytestmark = [pytest.mark.serve, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def test_a_users_own_service_streams_text_and_a_client_that_leaves_frees_its_blocks(
    model: Path, tmp_path: Path
) -> None:
    with serving("examples.own_service:Storyteller", tmp_path, CB_MODEL=str(model)) as server:
        whole = server.http.post("/tell", json={"topic": "a lighthouse", "max_tokens": 20})
        assert whole.status_code == 200
        assert whole.text
        long = {"topic": "the sea", "max_tokens": 60_000}
        aborted = 'cb_requests_finished_total{reason="abort"}'
        for count in range(1, 3):
            with server.http.stream("POST", "/tell", json=long) as response:
                pieces = response.iter_bytes()
                assert next(pieces)
                server.wait_until(lambda: server.metric("cb_requests_running") == 1)
            server.wait_until(server.is_idle)
            assert server.metric(aborted) == count
        assert server.terminate() == 0


def test_the_engine_answers_in_a_process_of_ones_own_without_http(
    model: Path, tmp_path: Path
) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "examples.in_process", str(model)],
        cwd=PROJECT,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("\n    ") == 3
