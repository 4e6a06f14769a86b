"""One connection to a runner and the requests that it carries. Runs on one asyncio loop.

All of them share one stream of events. When the connection ends, the runner aborts them, and here
every waiting reader gets an error.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from typing import Any

import aiohttp

from cb_backend import limits
from cb_backend.core.request import FinishReason
from cb_backend.core.step_io import TokenEvent
from cb_backend.errors import (
    CBError,
    EngineDeadError,
    EngineNotReadyError,
    EngineUnavailableError,
    error_from_info,
)
from cb_backend.serving import wire
from cb_backend.serving.engine_client import GenerateRequest
from cb_backend.serving.token_stream import TokenStream

CONNECT_TIMEOUT_S = 5.0


class RemoteSession:
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
        self._next_tag = 0
        self._streams: dict[int, TokenStream] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def connect(cls, http: aiohttp.ClientSession, silence_limit_s: float) -> RemoteSession:
        response: aiohttp.ClientResponse | None = None
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                response = await http.get(wire.EVENTS_PATH)
                if response.status != 200:
                    await bytes_of(response)
                session_id = wire.decode_hello(await response.content.readline())
        except BaseException as error:
            if response is not None:
                response.close()
            if isinstance(error, (aiohttp.ClientError, TimeoutError, OSError, ValueError)):
                raise unreachable(error) from error
            raise
        return cls(http, response, session_id, silence_limit_s)

    @property
    def has_ended(self) -> bool:
        return self._reader.done()

    async def open(self, request: GenerateRequest) -> list[TokenStream]:
        """One stream for each choice. Raises what the runner refuses the request with."""
        limits.NUM_CHOICES.check(request.n)
        if self.has_ended:  # since it was opened for this request
            raise EngineDeadError("the connection to the runner ended; try again")
        first = self._next_tag
        self._next_tag += request.n
        # A task of its own: whoever leaves while it is under way must still be able to abort.
        submit = self._spawn(self._submit(first, request))
        # Before the answer to the submit, since the first events may come before it too.
        streams = [self._add_stream(tag, submit) for tag in range(first, self._next_tag)]
        try:
            await asyncio.wait({submit, self._reader}, return_when=asyncio.FIRST_COMPLETED)
            if submit.done():
                submit.result()
        except BaseException:
            for stream in streams:
                await stream.aclose()
            raise
        return streams

    async def close(self) -> None:
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)

    async def _read(self) -> None:
        """Until the connection ends, whoever ends it; then every reader is told."""
        loop = asyncio.get_running_loop()
        reason = "the runner closed the connection"
        try:
            async with asyncio.timeout(self._silence_limit_s) as silence:
                while line := await self._response.content.readline():
                    self._fan_out(wire.decode_step(line))
                    silence.reschedule(loop.time() + self._silence_limit_s)
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

    def _add_stream(self, tag: int, submit: asyncio.Task[None]) -> TokenStream:
        """It is known here until its last event has come, read or not."""
        stream = TokenStream(on_drop=lambda: self._abort_after(submit, tag))
        self._streams[tag] = stream
        return stream

    async def _submit(self, tag: int, request: GenerateRequest) -> None:
        submission = wire.encode_submission(wire.Submission(self._id, tag, request))
        await self._post(wire.REQUESTS_PATH, submission)

    def _abort_after(self, submit: asyncio.Task[None], tag: int) -> None:
        """Not before the submit is through: an abort that overtakes it would hit nothing."""

        async def abort() -> None:
            await asyncio.wait({submit})
            error = None if submit.cancelled() else submit.exception()
            if isinstance(error, CBError) and not isinstance(error, EngineUnavailableError):
                self._streams.pop(tag, None)  # it was refused, and will have no last event
                return
            # An answer that was lost on its way does not say that the request was not taken.
            try:
                await self._post(wire.ABORT_PATH, {"session": self._id, "tag": tag})
            except CBError:
                self._reader.cancel()  # the runner ends what a session carried when it ends

        self._spawn(abort())

    async def _post(self, path: str, data: dict[str, Any]) -> None:
        try:
            async with self._http.post(path, json=data) as response:
                await bytes_of(response)
        except (aiohttp.ClientError, OSError) as error:
            raise unreachable(error) from error

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


async def bytes_of(response: aiohttp.ClientResponse) -> bytes:
    """The content of an answer of status 200. Raises the error that another one stands for."""
    content = await response.read()
    if response.status == 200:
        return content
    try:
        error = wire.decode_error(json.loads(content))
    except (ValueError, TypeError):  # not from our application
        status = response.status
        raise EngineUnavailableError(f"the runner answered with status {status}") from None
    raise error_from_info(error)


def answer_of(content: bytes) -> dict[str, Any]:
    answer = json.loads(content)
    assert isinstance(answer, dict)
    return answer


def unreachable(error: Exception) -> EngineUnavailableError:
    if isinstance(error, TimeoutError):
        return EngineNotReadyError("the runner does not answer in time")
    return EngineDeadError(f"the runner cannot be reached: {type(error).__name__}: {error}")
