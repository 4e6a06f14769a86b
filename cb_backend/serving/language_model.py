"""Text in, text out, over an engine: what the OpenAI routes and a user's own service call.

Runs on the asyncio loop; tokens come from an EngineClient.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import AsyncExitStack, aclosing
from typing import Literal, NamedTuple

from cb_backend.core.request import FinishReason, RequestCost
from cb_backend.core.sampling_params import SamplingParams
from cb_backend.core.step_io import ModelInfo, TokenEvent
from cb_backend.errors import InvalidRequestError, RequestFailedError
from cb_backend.serving.chat import Message
from cb_backend.serving.engine_client import EngineClient, GenerateRequest, check_one_choice
from cb_backend.serving.interleave import interleave
from cb_backend.serving.stop_strings import StopStrings
from cb_backend.serving.text_codec import TextCodec
from cb_backend.serving.token_stream import TokenStream

TextFinish = Literal["stop", "length"]


class TextDelta(NamedTuple):  # a tuple: each token of each stream makes one
    """What new tokens add to the text. The last delta of a request has a finish reason."""

    text: str  # may be empty: a character or a stop string may still be unfinished
    num_tokens: int  # all output tokens so far
    num_cached_tokens: int  # prompt tokens that the prefix cache saved
    finish_reason: TextFinish | None = None
    cost: RequestCost | None = None  # with the finish reason


class LanguageModel:
    def __init__(self, engine: EngineClient, codec: TextCodec) -> None:
        self.engine = engine
        self.codec = codec
        self._info: ModelInfo | None = None

    async def info(self) -> ModelInfo:
        """Raises EngineUnavailableError until the engine has loaded the model once."""
        if self._info is None:
            self._info = await self.engine.model_info()
        return self._info

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Raises PromptTooLongError for a text beyond any hope of fitting the context."""
        limit = (await self.info()).max_model_len
        return await self.codec.encode(
            text, max_tokens=limit, add_special_tokens=add_special_tokens
        )

    async def encode_chat(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True
    ) -> list[int]:
        limit = (await self.info()).max_model_len
        return await self.codec.encode_chat(
            messages, max_tokens=limit, add_generation_prompt=add_generation_prompt
        )

    async def stream_chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None
    ) -> AsyncGenerator[str, None]:
        """The answer's text, piece by piece. Leaving the loop early aborts the request."""
        prompt = await self.encode_chat(messages)
        deltas = self.generate(
            GenerateRequest(prompt_token_ids=prompt, params=params or SamplingParams())
        )
        async with aclosing(deltas):
            async for delta in deltas:
                if delta.text:
                    yield delta.text

    async def generate(
        self, request: GenerateRequest, stop: Sequence[str] = ()
    ) -> AsyncGenerator[TextDelta, None]:
        """One delta per delivery of the engine. Closing the generator aborts the request."""
        check_one_choice(request)
        choices = self.generate_choices([request], stop)
        async with aclosing(choices):
            async for _, delta in choices:
                yield delta

    async def generate_choices(
        self, requests: Sequence[GenerateRequest], stop: Sequence[str] = ()
    ) -> AsyncGenerator[tuple[int, TextDelta], None]:
        """The deltas of all choices of all requests, each with its place among them.

        Closing the generator aborts what still runs, and so does the first error.
        """
        for request in requests:
            if not request.prompt_token_ids:
                raise InvalidRequestError("prompt is empty: it has no tokens", field="prompt")
        async with AsyncExitStack() as stack:
            texts: list[AsyncGenerator[TextDelta, None]] = []
            for request in requests:
                for stream in await self.engine.open(request):
                    stack.push_async_callback(stream.aclose)
                    assembly = _TextAssembly(self.codec, stop, request.params.min_tokens)
                    texts.append(self._deltas(stream, assembly))
            # A generator that was never begun cannot clean up: the stack closes the streams.
            deltas = interleave(texts)
            async with aclosing(deltas):
                async for item in deltas:
                    yield item

    async def _deltas(
        self, stream: TokenStream, text: _TextAssembly
    ) -> AsyncGenerator[TextDelta, None]:
        async for event in stream:
            delta = text.add(event)
            if delta.finish_reason is None:
                yield delta
                continue
            cost = event.cost
            if event.finish_reason is None:  # a stop string, of which the engine knows nothing
                if delta.text:
                    yield delta._replace(finish_reason=None)
                    delta = delta._replace(text="")
                cost = await stream.end()
            yield delta._replace(cost=cost)
            return
        raise RequestFailedError("the engine ended the stream without a finish reason")

    async def close(self) -> None:
        """Ends the connection to the engine, and with it what still runs over it."""
        await self.engine.close()


class _TextAssembly:
    """Events to text, one token at a time, so that merged events give the same text.

    No stop string ends it within its first `min_tokens` tokens.
    """

    __slots__ = ("_detokenizer", "_min_tokens", "_num_cached_tokens", "_num_tokens", "_stop")

    def __init__(self, codec: TextCodec, stop: Sequence[str], min_tokens: int) -> None:
        self._detokenizer = codec.detokenizer()
        self._stop = StopStrings(stop)
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._num_cached_tokens = 0

    def add(self, event: TokenEvent) -> TextDelta:
        if event.finish_reason is FinishReason.ABORT:
            raise RequestFailedError("the request was aborted")
        self._num_cached_tokens = max(self._num_cached_tokens, event.num_cached_tokens)
        text, stopped = self._add_tokens(_text_tokens(event))
        if stopped:
            return self._delta(text, "stop")
        if event.finish_reason is None:
            return self._delta(text)
        self._num_tokens += len(event.token_ids) - len(_text_tokens(event))
        tail, stopped = self._stop.feed(self._detokenizer.flush(), may_end=self._may_end)
        if not stopped:
            tail += self._stop.flush()
        finish: TextFinish = "length" if event.finish_reason is FinishReason.LENGTH else "stop"
        return self._delta(text + tail, "stop" if stopped else finish)

    def _add_tokens(self, token_ids: Iterable[int]) -> tuple[str, bool]:
        text = ""
        for token_id in token_ids:
            self._num_tokens += 1
            piece, stopped = self._stop.feed(
                self._detokenizer.feed(token_id), may_end=self._may_end
            )
            text += piece
            if stopped:
                return text, True
        return text, False

    @property
    def _may_end(self) -> bool:
        return self._num_tokens > self._min_tokens

    def _delta(self, text: str, finish_reason: TextFinish | None = None) -> TextDelta:
        return TextDelta(text, self._num_tokens, self._num_cached_tokens, finish_reason)


def _text_tokens(event: TokenEvent) -> tuple[int, ...]:
    """The token that stops a request, its end-of-text or a stop token id, is counted, not shown."""
    return event.token_ids[:-1] if event.finish_reason is FinishReason.STOP else event.token_ids
