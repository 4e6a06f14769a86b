"""A model that cannot be served, and an engine that hangs, as a client and an operator see them."""

from __future__ import annotations

import json
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.serving_process import BENTOML, PROJECT, ServingProcess, environment, serving
from tests.e2e.tiny_model import write_tiny_model

pytestmark = [pytest.mark.serve, pytest.mark.timeout(240)]

COMPLETIONS = "/v1/completions"
LONG_PROMPT = 60_000  # tokens; in one step they take much longer than STEP_TIMEOUT_S
STEP_TIMEOUT_S = 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def test_a_folder_with_cut_weights_ends_the_command_at_once(model: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(model, tmp_path / "cut"))
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    ended = subprocess.run(
        [BENTOML, "serve", ".", "--port", "0"],
        cwd=PROJECT,
        env=environment(tmp_path, CB_MODEL=str(folder)),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode != 0
    assert f"the model cannot be served: {weights}" in ended.stderr
    assert "Traceback" not in ended.stderr + ended.stdout


def test_what_shows_only_while_loading_is_told_in_one_line_and_to_every_client(
    model: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(model, tmp_path / "other-shapes"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"hidden_size": 128}))
    server = ServingProcess(".", tmp_path, arguments=[], CB_MODEL=str(folder))
    try:
        server.wait_until(lambda: server.status_of("/livez") == 503)
        assert server.status_of("/readyz") == 503
        refused = server.http.post(COMPLETIONS, json={"prompt": "hi"})
        assert refused.status_code == 503
        assert "model.embed_tokens.weight" in refused.json()["error"]["message"]
        log = server.log.read_text()
        assert "Traceback" not in log
        assert log.count("the model cannot be served") == 1
    finally:
        server.close()


def test_a_step_that_hangs_ends_every_answer_and_turns_health_bad(
    model: Path, tmp_path: Path
) -> None:
    settings = {
        "CB_MODEL": str(model),
        "CB_STEP_TIMEOUT_S": str(STEP_TIMEOUT_S),
        "CB_MAX_NUM_SEQS": "2",
        "CB_MAX_NUM_BATCHED_TOKENS": str(LONG_PROMPT + 1000),
        "CB_MAX_PREFILL_CHUNK": str(LONG_PROMPT),
    }
    endless = {"prompt": "hi", "max_tokens": 60_000, "stream": True}

    def post(body: dict[str, Any]) -> httpx.Response:
        return httpx.post(server.url + COMPLETIONS, json=body, timeout=60.0)

    with ThreadPoolExecutor(3) as pool, serving(".", tmp_path, **settings) as server:
        running = pool.submit(post, endless)
        server.wait_until(lambda: server.metric("cb_generation_tokens_total") > 0)
        hanging = pool.submit(post, {"prompt": [9] * LONG_PROMPT})
        server.wait_until(lambda: server.metric("cb_requests_running") == 2)
        waiting = pool.submit(post, endless)
        server.wait_until(lambda: server.status_of("/livez") == 503)
        assert server.status_of("/readyz") == 503
        assert running.result().status_code == 200
        last = json.loads(running.result().text.split("\n\n")[-2].removeprefix("data: "))
        for response in (hanging.result(), waiting.result(), post({"prompt": "hi"})):
            assert response.status_code == 503
            assert response.json() == last
        assert last["error"]["code"] == "engine_dead"
