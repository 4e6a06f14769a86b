"""How a served model begins and ends: wrong settings, a crash of the runner, SIGTERM."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.serving_process import BENTOML, PROJECT, ServingProcess, environment, serving
from tests.e2e.tiny_model import write_tiny_model

pytestmark = [pytest.mark.serve, pytest.mark.timeout(240)]

COMPLETIONS = "/v1/completions"


def request(max_tokens: int) -> dict[str, Any]:
    return {
        "prompt": "the quick brown fox",
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
    }


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def server(model: Path, tmp_path: Path) -> Iterator[ServingProcess]:
    with serving(".", tmp_path, CB_MODEL=str(model), CB_DRAIN_TIMEOUT_S="3") as server:
        yield server


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"CB_MODEL": "no-such-model:latest"}, "no such model in the BentoML store"),
        ({"CB_MODEL": "/no/such/folder"}, "no such folder"),
        ({"CB_MODEL": "smollm2-135m-instruct:latest"}, "make model"),
        ({"CB_MAX_NUM_SEQS": "many"}, "CB_MAX_NUM_SEQS must be an integer"),
        ({"CB_TYPO": "1"}, "unknown setting CB_TYPO"),
    ],
)
@pytest.mark.parametrize("arguments", [[], ["--development"]])
def test_a_wrong_setting_ends_the_command_at_once_with_one_message(
    tmp_path: Path, settings: dict[str, str], said: str, arguments: list[str]
) -> None:
    # An empty BENTOML_HOME: nothing is in its store.
    ended = subprocess.run(
        [BENTOML, "serve", ".", "--port", "0", *arguments],
        cwd=PROJECT,
        env=environment(tmp_path, **settings),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode != 0
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr + ended.stdout


def test_a_killed_runner_ends_its_streams_with_an_error_and_the_next_one_serves(
    server: ServingProcess,
) -> None:
    with server.http.stream("POST", COMPLETIONS, json=request(60_000)) as response:
        pieces = response.iter_bytes()
        next(pieces)
        server.wait_until(lambda: server.metric("cb_requests_running") == 1)
        server.worker("EngineRunner").kill()
        rest = b"".join(pieces).decode()
    assert '"code":"engine_dead"' in rest
    assert "[DONE]" not in rest
    server.wait_until(lambda: server.status_of("/livez") == 503)
    server.wait_until_ready()
    assert server.status_of("/livez") == 200
    server.wait_until(server.is_idle)  # no gauge still speaks for the dead one
    assert "[DONE]" in server.http.post(COMPLETIONS, json=request(4)).text


def test_sigterm_lets_a_running_stream_end(server: ServingProcess) -> None:
    with server.http.stream("POST", COMPLETIONS, json=request(300)) as response:
        pieces = response.iter_bytes()
        next(pieces)
        server.process.send_signal(signal.SIGTERM)
        assert b"".join(pieces).decode().endswith("data: [DONE]\n\n")
    assert server.process.wait(30.0) == 0


def test_sigterm_ends_an_endless_stream_at_the_drains_deadline(server: ServingProcess) -> None:
    def read() -> str:
        with httpx.stream(
            "POST", server.url + COMPLETIONS, json=request(60_000), timeout=60.0
        ) as response:
            return response.read().decode()

    with ThreadPoolExecutor(4) as pool:
        readers = [pool.submit(read) for _ in range(4)]
        server.wait_until(lambda: server.metric("cb_requests_running") == 4)
        server.process.send_signal(signal.SIGTERM)
        for reader in readers:
            text = reader.result()
            assert '{"error":' in text.split("\n\n")[-2]
            assert "[DONE]" not in text
    assert server.process.wait(30.0) == 0


def test_development_mode_runs_the_engine_in_the_gateways_process(
    model: Path, tmp_path: Path
) -> None:
    with serving(".", tmp_path, arguments=["--development"], CB_MODEL=str(model)) as server:
        assert "[DONE]" in server.http.post(COMPLETIONS, json=request(8)).text
        server.wait_until(lambda: server.metric("cb_generation_tokens_total") == 8)
        assert server.metric("cb_time_to_first_token_seconds_count") == 1
        several = server.http.post(COMPLETIONS, json=request(8) | {"n": 3, "stream": False})
        assert [choice["index"] for choice in several.json()["choices"]] == [0, 1, 2]
        with server.http.stream("POST", COMPLETIONS, json=request(60_000)) as response:
            next(response.iter_bytes())
        server.wait_until(server.is_idle)
