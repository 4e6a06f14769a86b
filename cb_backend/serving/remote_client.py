"""The engine of a runner in another process, over its URL. Runs on one asyncio loop.

All requests of a client share one stream of events, its session. The session ends with the
connection: the runner then aborts what it carried, and here every waiting reader gets an error.
The next request opens a new one, so a runner that comes back is used again.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import aclosing
from typing import Any
from urllib.parse import unquote, urlsplit

import aiohttp

from cb_backend.core.request import FinishReason
from cb_backend.core.step_io import ModelInfo, TokenEvent
from cb_backend.errors import (
    CBError,
    EngineDeadError,
    EngineNotReadyError,
    EngineUnavailableError,
    error_from_info,
)
from cb_backend.serving import wire
from cb_backend.serving.engine_client import EngineHealth, GenerateRequest
from cb_backend.serving.token_stream import TokenStream

_CONNECT_TIMEOUT_S = 5.0
# The runner beats every second. Ten without a line: its process hangs, or the machine is gone.
_SILENCE_LIMIT_S = 10.0
_HEALTH_TIMEOUT_S = 2.0
# A line of one step: at most every running request's tokens; 64 KiB, aiohttp's default, is short.
_MAX_LINE_BYTES = 4 * 2**20


class RemoteClient:
    def __init__(
        self, url: str, *, runner_name: str = "", silence_limit_s: float = _SILENCE_LIMIT_S
    ) -> None:
        """`url` is file:///path/of.sock, http(s)://host:port or tcp://host:port."""
        self._url = url
        # Where one address serves several runners, this header says which (BentoCloud does that).
        self._headers = {"Runner-Name": runner_name} if runner_name else {}
        self._silence_limit_s = silence_limit_s
        self._http: aiohttp.ClientSession | None = None
        self._session: _Session | None = None
        self._connecting = asyncio.Lock()
        self._was_reached = False

    async def model_info(self) -> ModelInfo:
        return wire.decode_model_info(await self._get(wire.MODEL_PATH, _CONNECT_TIMEOUT_S))

    async def health(self) -> EngineHealth:
        try:
            health = wire.decode_health(await self._get(wire.HEALTH_PATH, _HEALTH_TIMEOUT_S))
        except CBError as error:
            # A runner that has never answered is still starting.
            return EngineHealth(ready=False, alive=not self._was_reached, status=error.message)
        self._was_reached = True
        return health

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenEvent]:
        session = await self._open_session()
        async with aclosing(session.generate(request)) as events:
            async for event in events:
                yield event

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
        if self._http is not None:
            await self._http.close()

    async def _open_session(self) -> _Session:
        async with self._connecting:
            if self._session is None or self._session.has_ended:
                self._session = await _Session.open(self._client(), self._silence_limit_s)
            return self._session

    async def _get(self, path: str, timeout_s: float) -> dict[str, Any]:
        try:
            async with asyncio.timeout(timeout_s), self._client().get(path) as response:
                return await _answer_of(response)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _unreachable(error) from error

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
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S),
                read_bufsize=_MAX_LINE_BYTES,
            )
        return self._http


class _Session:
    """One connection's stream of events, and the requests that it carries."""

    def __init__(
        self,
        http: aiohttp.ClientSession,
        response: aiohttp.ClientResponse,
        session_id: str,
        silence_limit_s: float,
    ) -> None:
        self._http = http
        self._response = response
        self._id = session_id
        self._silence_limit_s = silence_limit_s
        self._tags = itertools.count()
        self._streams: dict[int, TokenStream] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def open(cls, http: aiohttp.ClientSession, silence_limit_s: float) -> _Session:
        response: aiohttp.ClientResponse | None = None
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                response = await http.get(wire.EVENTS_PATH)
                if response.status != 200:
                    await _answer_of(response)
                session_id = wire.decode_hello(await response.content.readline())
        except BaseException as error:
            if response is not None:
                response.close()
            if isinstance(error, (aiohttp.ClientError, TimeoutError, OSError, ValueError)):
                raise _unreachable(error) from error
            raise
        return cls(http, response, session_id, silence_limit_s)

    @property
    def has_ended(self) -> bool:
        return self._reader.done()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenEvent, None]:
        if self.has_ended:  # since it was opened for this request
            raise EngineDeadError("the connection to the runner ended; try again")
        tag = next(self._tags)
        # A task of its own: whoever leaves while it is under way must still be able to abort.
        submit = self._spawn(self._submit(tag, request))
        stream = TokenStream(on_drop=lambda: self._abort_after(submit, tag))
        # Before the answer to the submit, since the first events may come before it too.
        self._streams[tag] = stream
        try:
            await asyncio.wait({submit, self._reader}, return_when=asyncio.FIRST_COMPLETED)
            if submit.done():
                submit.result()
            async for event in stream:
                yield event
        finally:
            self._streams.pop(tag, None)
            await stream.aclose()

    async def close(self) -> None:
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)

    async def _read(self) -> None:
        """Until the connection ends, whoever ends it; then every reader is told."""
        reason = "the runner closed the connection"
        try:
            while True:
                async with asyncio.timeout(self._silence_limit_s):
                    line = await self._response.content.readline()
                if not line:
                    break
                self._fan_out(wire.decode_step(line))
        except TimeoutError:
            reason = f"the runner has been silent for {self._silence_limit_s:g} s"
        except (aiohttp.ClientError, OSError, ValueError) as error:
            reason = f"the connection to the runner broke: {error}"
        finally:
            self._response.close()
            self._fail_all(EngineDeadError(f"{reason}; the request's tokens are lost, try again"))

    def _fan_out(self, events: list[tuple[int, TokenEvent]]) -> None:
        for tag, event in events:
            stream = self._streams.get(tag)
            if stream is not None:
                stream.put(event)
                if event.finish_reason is not None:
                    del self._streams[tag]

    def _fail_all(self, error: CBError) -> None:
        for tag, stream in self._streams.items():
            stream.put(
                TokenEvent(
                    request_id=str(tag),
                    token_ids=(),
                    step=0,
                    time=0.0,
                    finish_reason=FinishReason.ERROR,
                    error=error.info(),
                )
            )
        self._streams.clear()

    async def _submit(self, tag: int, request: GenerateRequest) -> None:
        submission = wire.encode_submission(wire.Submission(self._id, tag, request))
        await self._post(wire.REQUESTS_PATH, submission)

    def _abort_after(self, submit: asyncio.Task[None], tag: int) -> None:
        """Not before the submit is through: an abort that overtakes it would hit nothing."""

        async def abort() -> None:
            await asyncio.wait({submit})
            if not submit.cancelled() and submit.exception() is None and not self.has_ended:
                await self._post(wire.ABORT_PATH, {"session": self._id, "tag": tag})

        self._spawn(abort())

    async def _post(self, path: str, data: dict[str, Any]) -> None:
        try:
            async with self._http.post(path, json=data) as response:
                await _answer_of(response)
        except (aiohttp.ClientError, OSError) as error:
            raise _unreachable(error) from error

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[None]) -> None:
        """An error belongs to whoever awaits the task; a lost abort's session ends as well."""
        self._background.discard(task)
        if not task.cancelled():
            task.exception()


async def _answer_of(response: aiohttp.ClientResponse) -> dict[str, Any]:
    """The runner's JSON. Raises the error that it stands for."""
    try:
        data = json.loads(await response.read())
    except ValueError:
        data = None
    if response.status == 200 and isinstance(data, dict):
        return data
    if isinstance(data, dict) and "code" in data:
        raise error_from_info(wire.decode_error(data))
    raise EngineUnavailableError(f"the runner answered with status {response.status}")


def _unreachable(error: Exception) -> EngineUnavailableError:
    if isinstance(error, TimeoutError):
        return EngineNotReadyError("the runner does not answer in time")
    return EngineDeadError(f"the runner cannot be reached: {type(error).__name__}: {error}")
