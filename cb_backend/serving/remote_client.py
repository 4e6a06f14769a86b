"""The engine of a runner in another process, over its URL. Runs on one asyncio loop.

All requests of a client share one session. When it has ended, the next request opens a new one,
so a runner that comes back is used again.
"""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import unquote, urlsplit

import aiohttp

from cb_backend.core.explain import RequestView
from cb_backend.core.step_io import ModelInfo
from cb_backend.errors import CBError
from cb_backend.serving import wire
from cb_backend.serving.engine_client import EngineClient, EngineHealth, GenerateRequest
from cb_backend.serving.remote_session import (
    CONNECT_TIMEOUT_S,
    RemoteSession,
    answer_of,
    bytes_of,
    unreachable,
)
from cb_backend.serving.token_stream import TokenStream

# The runner beats every second. Ten without a line: its process hangs, or the machine is gone.
_SILENCE_LIMIT_S = 10.0
_HEALTH_TIMEOUT_S = 2.0
_CONTROL_TIMEOUT_S = 30.0  # a call waits for the step that runs
# A line of one step: at most every running request's tokens; 64 KiB, aiohttp's default, is short.
_MAX_LINE_BYTES = 4 * 2**20


class RemoteClient(EngineClient):
    def __init__(
        self, url: str, *, runner_name: str = "", silence_limit_s: float = _SILENCE_LIMIT_S
    ) -> None:
        """`url` is file:///path/of.sock, http(s)://host:port or tcp://host:port."""
        self._url = url
        # Where one address serves several runners, this header says which (BentoCloud does that).
        self._headers = {"Runner-Name": runner_name} if runner_name else {}
        self._silence_limit_s = silence_limit_s
        self._http: aiohttp.ClientSession | None = None
        self._session: RemoteSession | None = None
        self._connecting = asyncio.Lock()
        self._was_reached = False

    async def model_info(self) -> ModelInfo:
        return wire.decode_model_info(await self._get(wire.MODEL_PATH, CONNECT_TIMEOUT_S))

    async def health(self) -> EngineHealth:
        try:
            health = wire.decode_health(await self._get(wire.HEALTH_PATH, _HEALTH_TIMEOUT_S))
        except CBError as error:
            # A runner that has never answered is still starting.
            return EngineHealth(ready=False, alive=not self._was_reached, status=error.message)
        self._was_reached = True
        return health

    async def open(self, request: GenerateRequest) -> list[TokenStream]:
        session = await self._open_session()
        return await session.open(request)

    async def live_requests(self) -> list[RequestView]:
        return wire.decode_views(await self._get(wire.VIEWS_PATH, _CONTROL_TIMEOUT_S))

    async def trace(self) -> bytes:
        return await self._ask("GET", wire.TRACE_PATH, _CONTROL_TIMEOUT_S)

    async def use_policy(self, name: str) -> None:
        await self._ask("POST", wire.POLICY_PATH, _CONTROL_TIMEOUT_S, {"policy": name})

    async def resize_kv_pool(self, num_blocks: int) -> None:
        body = {"num_blocks": num_blocks}
        await self._ask("POST", wire.KV_POOL_PATH, _CONTROL_TIMEOUT_S, body)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
        if self._http is not None:
            await self._http.close()

    async def _open_session(self) -> RemoteSession:
        async with self._connecting:
            if self._session is None or self._session.has_ended:
                self._session = await RemoteSession.connect(self._client(), self._silence_limit_s)
            return self._session

    async def _get(self, path: str, timeout_s: float) -> dict[str, Any]:
        return answer_of(await self._ask("GET", path, timeout_s))

    async def _ask(
        self, method: str, path: str, timeout_s: float, body: dict[str, Any] | None = None
    ) -> bytes:
        """The answer's content. Raises the error that the runner answers with."""
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._client().request(method, path, json=body) as response,
            ):
                return await bytes_of(response)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise unreachable(error) from error

    def _client(self) -> aiohttp.ClientSession:
        """Made on first use: it belongs to the running loop."""
        if self._http is None:
            parts = urlsplit(self._url)
            connector: aiohttp.BaseConnector
            if parts.scheme == "file":
                connector = aiohttp.UnixConnector(unquote(parts.path), limit=0)
                base = "http://runner"
            else:
                connector = aiohttp.TCPConnector(limit=0)
                base = f"{parts.scheme.replace('tcp', 'http')}://{parts.netloc}"
            self._http = aiohttp.ClientSession(
                base,
                connector=connector,
                headers=self._headers,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
                read_bufsize=_MAX_LINE_BYTES,
            )
        return self._http
