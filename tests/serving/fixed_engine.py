"""An engine behind the routes whose events are given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import httpx

from cb_backend.core.step_io import ModelInfo, TokenEvent
from cb_backend.serving.engine_client import (
    EngineClient,
    EngineHealth,
    GenerateRequest,
)
from cb_backend.serving.text_codec import TextCodec
from cb_backend.serving.token_stream import TokenStream
from tests.fakes import make_model_info
from tests.serving.conftest import (
    CONTEXT,
    gateway,
)
from tests.serving.routes import CHAT


class FixedStream(TokenStream):
    """Brings `events`, one by one, and then raises `error` if there is one."""

    def __init__(self, events: Sequence[TokenEvent], error: Exception | None) -> None:
        super().__init__(on_drop=lambda: None)
        self._left = list(events)
        self._error = error

    async def __anext__(self) -> TokenEvent:
        if self._left:
            return self._left.pop(0)
        raise self._error or StopAsyncIteration


class FixedEngine(EngineClient):
    """Answers each request with a FixedStream."""

    def __init__(self, events: Sequence[TokenEvent], error: Exception | None = None) -> None:
        self._events = events
        self._error = error

    async def model_info(self) -> ModelInfo:
        return make_model_info(max_model_len=CONTEXT)

    async def health(self) -> EngineHealth:
        return EngineHealth(True, True, "ready")

    async def open(self, request: GenerateRequest) -> list[TokenStream]:
        return [FixedStream(self._events, self._error)]

    async def close(self) -> None:
        pass


async def answer_of(engine: FixedEngine, codec: TextCodec, body: dict[str, Any]) -> httpx.Response:
    transport = httpx.ASGITransport(gateway(engine, codec), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
        return await http.post(CHAT, json=body)
