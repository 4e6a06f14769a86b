"""A gateway's client of a runner on a unix socket."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from cb_backend.core.sampling_params import SamplingParams
from cb_backend.serving.engine_client import GenerateRequest
from cb_backend.serving.remote_client import RemoteClient
from cb_backend.serving.runner_app import RunnerRoutes
from tests.serving.conftest import (
    Script,
    WatchedEngine,
    served,
)


def runner(engine: WatchedEngine | None, **settings: Any) -> RunnerRoutes:
    routes = RunnerRoutes(**settings)
    routes.engine = engine
    return routes


@pytest.fixture(name="client")
async def client_fixture(engine: WatchedEngine, tmp_path: Path) -> AsyncIterator[RemoteClient]:
    path = tmp_path / "runner.sock"
    async with served(runner(engine).application(), path):
        client = RemoteClient(f"file://{path}", runner_name="EngineRunner")
        yield client
        await client.close()


def request_for(script: Script, text: str = "hi", **params: Any) -> GenerateRequest:
    prompt = script.tokenizer.encode(text + "<|go|>")
    return GenerateRequest(
        prompt_token_ids=prompt, params=SamplingParams(temperature=0.0, **params)
    )


async def tokens_of(client: RemoteClient, request: GenerateRequest) -> list[int]:
    return [token async for event in client.generate(request) for token in event.token_ids]
