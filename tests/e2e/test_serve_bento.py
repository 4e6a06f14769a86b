"""The default model, served from the checkout and from a Bento that was built offline."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import bentoml
import pytest

from cb_backend.default_model import NAME
from tests.e2e.serving_process import (
    BENTOML,
    PROJECT,
    ServingProcess,
    default_model,
    environment,
    serving,
)

pytestmark = [pytest.mark.serve, pytest.mark.timeout(300)]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A BENTOML_HOME of the test's own, with the default model in its store."""
    stored = Path(default_model())
    folder = tmp_path / "models" / NAME
    folder.mkdir(parents=True)
    (folder / stored.name).symlink_to(stored)
    (folder / "latest").write_text(stored.name)
    return tmp_path


def answers(server: ServingProcess) -> list[Any]:
    assert [m["id"] for m in server.http.get("/v1/models").json()["data"]] == [NAME]
    question = [{"role": "user", "content": "What is the capital of France? Answer briefly."}]
    bodies = [
        ("/v1/chat/completions", {"messages": question, "temperature": 0}),
        ("/v1/completions", {"prompt": "2 3 5 7", "temperature": 0, "max_tokens": 8}),
        ("/v1/completions", {"prompt": "Once", "seed": 5, "max_tokens": 8}),
    ]
    return [server.http.post(path, json=body).json()["choices"] for path, body in bodies]


def test_a_bento_built_offline_answers_as_the_checkout_does(home: Path) -> None:
    with serving(".", home) as server:
        from_checkout = answers(server)
    assert from_checkout[0][0]["message"]["content"] == "The capital of France is Paris."
    built = subprocess.run(
        [BENTOML, "build", "--output", "tag"],
        cwd=PROJECT,
        # No index and no hub: whoever asks for one fails at once.
        env=environment(home, PIP_INDEX_URL="http://127.0.0.1:9", HF_HUB_OFFLINE="1"),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    tag = built.stdout.strip().splitlines()[-1].removeprefix("__tag__:")
    # A newer model of that name is not what the Bento was built with.
    newer = home / "models" / NAME / "newer"
    newer.mkdir()
    (newer / "config.json").write_text("{}")
    (newer / "model.yaml").write_text(
        (Path(default_model()) / "model.yaml")
        .read_text()
        .replace(Path(default_model()).name, "newer")
    )
    (home / "models" / NAME / "latest").write_text("newer")
    with serving(tag, home) as server:
        assert answers(server) == from_checkout


def test_the_store_is_bentomls_own() -> None:
    assert os.path.samefile(bentoml.models.get(f"{NAME}:latest").path, default_model())
