"""A gateway over a real engine whose executor speaks from a script instead of a model."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
import warnings
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from transformers import PreTrainedTokenizerFast

from cb_backend.config import EngineConfig
from cb_backend.core.step_io import StepPlan
from cb_backend.engine.engine import Engine
from cb_backend.engine.engine_thread import EngineThread
from cb_backend.serving.async_engine import AsyncEngine
from cb_backend.serving.engine_client import EngineClient, LocalClient
from cb_backend.serving.gateway import Gateway
from cb_backend.serving.language_model import LanguageModel
from cb_backend.serving.text_codec import TextCodec
from tests.engine.conftest import eventually
from tests.fakes import ShadowExecutor, make_model_info
from tests.serving.tiny_tokenizer import build_tokenizer, bytes_to_unicode

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what BentoML's own models make pydantic say at import
    from bentoml.models import BentoModel  # noqa: F401

MODEL = "fake"
CONTEXT = 256  # tokens


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer()


@pytest.fixture(scope="session")
def tokenizer_folder(
    tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def codec(tokenizer_folder: Path) -> TextCodec:
    return TextCodec.from_folder(tokenizer_folder)


@dataclass
class Script:
    """The engine answers every prompt with `token_ids`, then with its end token.

    A prompt ends with <|assistant|> or <|go|>, so that the script knows where the answer begins.
    """

    tokenizer: PreTrainedTokenizerFast
    token_ids: list[int] = field(default_factory=list)
    before_step: Callable[[StepPlan], None] = lambda plan: None
    aborted: int = 0  # aborts that have been put into the engine's inbox

    def say(self, text: str) -> list[int]:
        self.token_ids = self.tokenizer.encode(text, add_special_tokens=False)
        return self.token_ids

    def id_of(self, token: str) -> int:
        token_id = self.tokenizer.convert_tokens_to_ids(token)
        assert isinstance(token_id, int)
        return token_id

    def bytes_of(self, data: bytes) -> list[int]:
        """One token for each byte, whether they make characters or not."""
        backend = self.tokenizer.backend_tokenizer
        unicode_of = bytes_to_unicode()
        return [backend.token_to_id(unicode_of[byte]) for byte in data]

    def next_token(self, token_ids: Sequence[int]) -> int:
        markers = (self.id_of("<|assistant|>"), self.id_of("<|go|>"))
        start = max(index for index, token in enumerate(token_ids) if token in markers) + 1
        said = len(token_ids) - start
        return self.token_ids[said] if said < len(self.token_ids) else self.id_of("<|end|>")


@pytest.fixture
def script(tokenizer: PreTrainedTokenizerFast) -> Script:
    script = Script(tokenizer)
    script.say("the quick brown fox")
    return script


class Gate:
    """Steps wait here while it is shut. Opens by itself after a while, so that tests end."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._open = threading.Event()

    def __call__(self, plan: StepPlan) -> None:
        self.reached.set()
        self._open.wait(20.0)

    def open(self) -> None:
        self._open.set()


async def until(condition: Callable[[], bool]) -> None:
    """Another thread or task is about to make this true; the limit is for a test that fails."""
    await asyncio.to_thread(eventually, condition)


async def until_idle(engine: AsyncEngine) -> None:
    """No request left, and no block in use."""
    await until(
        lambda: (
            engine.stats().num_running == 0
            and engine.stats().num_waiting == 0
            and engine.stats().kv_usage == 0.0
        )
    )


class WatchedEngine(AsyncEngine):
    """Tells the script of aborts, and how many requests are queued or running."""

    def __init__(self, config: EngineConfig, thread: EngineThread, script: Script) -> None:
        super().__init__(config, thread)
        self._script = script

    @property
    def num_live(self) -> int:
        return len(self._thread.output_queue)

    def abort(self, request_id: str) -> None:
        super().abort(request_id)
        self._script.aborted += 1


@contextlib.contextmanager
def running_engine(script: Script, **settings: Any) -> Iterator[WatchedEngine]:
    config = EngineConfig(model=MODEL, check_invariants=True, **settings)
    info = make_model_info(
        num_blocks=2 * CONTEXT // 4,
        max_model_len=CONTEXT,
        eos_token_ids=(script.id_of("<|end|>"),),
    )
    executor = ShadowExecutor(
        info, next_token=script.next_token, before_step=lambda plan: script.before_step(plan)
    )
    thread = EngineThread(
        lambda: Engine(config, executor, clock=time.monotonic),
        step_timeout_s=30.0,
        drain_timeout_s=1.0,
    )
    thread.start()
    engine = WatchedEngine(config, thread, script)
    eventually(lambda: engine.is_ready)
    try:
        yield engine
    finally:
        if isinstance(script.before_step, Gate):
            script.before_step.open()
        engine.close()


@pytest.fixture
def engine(script: Script) -> Iterator[WatchedEngine]:
    with running_engine(script) as engine:
        yield engine


def gateway(client: EngineClient, codec: TextCodec, *, admin_key: str | None = None) -> Starlette:
    gateway = Gateway(admin_key=admin_key)
    gateway.serve(LanguageModel(client, codec))
    return gateway.application()


@pytest.fixture
async def http(engine: AsyncEngine, codec: TextCodec) -> AsyncIterator[httpx.AsyncClient]:
    """The gateway without a socket; answers arrive whole."""
    app = gateway(LocalClient(engine), codec)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        yield client


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # the signals are pytest's


@contextlib.asynccontextmanager
async def served(app: Starlette, path: Path) -> AsyncIterator[uvicorn.Server]:
    """`app` on a unix socket, in this loop."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    server = _Server(
        uvicorn.Config(
            app, lifespan="off", ws="none", log_level="error", timeout_graceful_shutdown=1
        )
    )
    task = asyncio.create_task(server.serve(sockets=[listener]))
    await until(lambda: server.started)
    try:
        yield server
    finally:
        server.should_exit = True
        await task
        listener.close()


@pytest.fixture
async def wire_http(
    engine: AsyncEngine, codec: TextCodec, tmp_path: Path
) -> AsyncIterator[aiohttp.ClientSession]:
    """The gateway behind a real server and socket: chunks as they come, and clients that leave."""
    path = tmp_path / "gateway.sock"
    async with (
        served(gateway(LocalClient(engine), codec), path),
        aiohttp.ClientSession(
            "http://gateway", connector=aiohttp.UnixConnector(str(path), limit=0)
        ) as session,
    ):
        yield session


def chat(content: Any = "hi", **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], "temperature": 0, **fields}


def completion(prompt: Any = "hi<|go|>", **fields: Any) -> dict[str, Any]:
    return {"prompt": prompt, "temperature": 0, **fields}


def sse_objects(body: str) -> list[Any]:
    """Every event's JSON, in order; checks the framing, and that [DONE] comes once, last."""
    assert body.endswith("\n\n")
    lines = body[:-2].split("\n\n")
    assert all(line.startswith("data: ") and "\n" not in line for line in lines)
    *events, last = (line.removeprefix("data: ") for line in lines)
    assert last == "[DONE]", last
    return [json.loads(event) for event in events]
