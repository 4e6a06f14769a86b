"""The OpenAI routes, as a Starlette application that a service mounts. Asyncio loop.

Headers of a stream go out with its first token, so a refused request has its real status; a
client that leaves is noticed at any time, and its engine requests are aborted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from cb_backend import limits
from cb_backend.core.step_io import ModelInfo
from cb_backend.errors import EngineNotReadyError, InvalidRequestError
from cb_backend.serving.api_errors import (
    ModelNotFoundError,
    as_cb_error,
    error_body,
)
from cb_backend.serving.client_watch import StreamResponse, run_while_connected
from cb_backend.serving.engine_client import GenerateRequest
from cb_backend.serving.json_body import read_json_object
from cb_backend.serving.language_model import LanguageModel, TextDelta
from cb_backend.serving.openai_objects import (
    DONE,
    AnswerFormat,
    ChatFormat,
    CompletionFormat,
    Usage,
    model_object,
    sse,
)
from cb_backend.serving.protocol import (
    ChatCompletionBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    parse_body,
)
from cb_backend.serving.request_headers import label_of, tenant_of

# What arrives from the engine for one of an answer's choices.
ChoiceDelta = tuple[int, TextDelta]


class OpenAIRoutes:
    """`model` is set once the service has one; until then every route answers 503."""

    def __init__(self) -> None:
        self.model: LanguageModel | None = None
        self._created = int(time.time())

    def routes(self) -> list[Route]:
        return [
            Route("/v1/models", self.list_models, methods=["GET"]),
            Route("/v1/models/{model_id:path}", self.get_model, methods=["GET"]),
            Route("/v1/chat/completions", self.chat_completions, methods=["POST"]),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
        ]

    async def list_models(self, request: Request) -> Response:
        info = await self._language_model().info()
        return JSONResponse({"object": "list", "data": [model_object(info, self._created)]})

    async def get_model(self, request: Request) -> Response:
        info = await self._language_model().info()
        _check_model(request.path_params["model_id"], info)
        return JSONResponse(model_object(info, self._created))

    async def chat_completions(self, request: Request) -> Response:
        body = parse_body(ChatCompletionBody, await read_json_object(request))
        model = self._language_model()
        info = await model.info()
        _check_model(body.model, info)
        try:
            prompts = [await model.encode_chat(body.messages)]
            form = ChatFormat(info.model_name, label_of(request))
            return await self._answer(request, body, prompts, form)
        except InvalidRequestError as error:
            if error.field == "prompt":  # what the engine calls it, and this client does not
                error.field = "messages"
            raise

    async def completions(self, request: Request) -> Response:
        body = parse_body(CompletionBody, await read_json_object(request))
        model = self._language_model()
        info = await model.info()
        _check_model(body.model, info)
        prompts = [
            await model.encode(prompt) if isinstance(prompt, str) else prompt
            for prompt in body.prompt
        ]
        for index, prompt in enumerate(prompts):
            if not prompt:
                raise InvalidRequestError(
                    f"prompt[{index}] is empty: it has no tokens", field="prompt"
                )
            # The engine would say the same, after millions of ids have been sent to it.
            limits.check_prompt_fits(len(prompt), info.max_model_len)
        form = CompletionFormat(info.model_name, label_of(request))
        return await self._answer(request, body, prompts, form)

    async def tokenize(self, request: Request) -> Response:
        body = parse_body(TokenizeBody, await read_json_object(request))
        model = self._language_model()
        info = await model.info()
        _check_model(body.model, info)
        if body.messages is not None:
            token_ids = await model.encode_chat(
                body.messages, add_generation_prompt=body.add_generation_prompt
            )
        else:
            token_ids = await model.encode(
                body.prompt or "", add_special_tokens=body.add_special_tokens is not False
            )
        return JSONResponse(
            {"tokens": token_ids, "count": len(token_ids), "max_model_len": info.max_model_len}
        )

    async def detokenize(self, request: Request) -> Response:
        body = parse_body(DetokenizeBody, await read_json_object(request))
        model = self._language_model()
        info = await model.info()
        _check_model(body.model, info)
        # More is no text of this model's, and one call holds all threads up.
        limits.check_at_most("tokens", len(body.tokens), info.max_model_len, "ids")
        for index, token_id in enumerate(body.tokens):
            if token_id >= info.vocab_size:
                raise InvalidRequestError(
                    f"tokens[{index}] must be below {info.vocab_size}, got {token_id}",
                    field="tokens",
                )
        text = await asyncio.to_thread(model.codec.decode, body.tokens)
        return JSONResponse({"prompt": text})

    async def _answer(
        self,
        request: Request,
        body: ChatCompletionBody | CompletionBody,
        prompts: Sequence[list[int]],
        form: AnswerFormat,
    ) -> Response:
        params, tenant = body.sampling_params(), tenant_of(request)
        requests = [
            GenerateRequest(
                prompt_token_ids=prompt,
                params=params,
                n=body.n,
                cache_salt=body.cache_salt,
                priority=body.priority,
                tenant=tenant,
                deadline_s=body.deadline_s,
                pin_prefix_s=body.pin_prefix_s,
                label=form.id,
            )
            for prompt in prompts
        ]
        usage = Usage(prompt_tokens=sum(map(len, prompts)), n=body.n)
        # Choice number c of prompt number p comes as p * n + c.
        deltas = self._language_model().generate_choices(requests, body.stop)
        if not body.stream:
            choices = await run_while_connected(request.receive, _collect(deltas, usage))
            return JSONResponse(form.whole(choices, usage))
        events = _stream(deltas, form, usage, include_usage=body.include_usage)
        first = await run_while_connected(request.receive, anext(events))
        return StreamResponse(first, events)

    def _language_model(self) -> LanguageModel:
        if self.model is None:
            raise EngineNotReadyError("the service is starting")
        return self.model


def _check_model(name: str | None, info: ModelInfo) -> None:
    if name is not None and name != info.model_name:
        raise ModelNotFoundError(
            f"the model {name!r} does not exist; this server has {info.model_name!r}",
            field="model",
        )


async def _collect(
    deltas: AsyncGenerator[ChoiceDelta, None], usage: Usage
) -> list[tuple[str, str]]:
    texts: dict[int, list[str]] = {}
    reasons: dict[int, str] = {}
    async with aclosing(deltas):
        async for choice, delta in deltas:
            texts.setdefault(choice, []).append(delta.text)
            usage.count(choice, delta)
            if delta.finish_reason is not None:
                reasons[choice] = delta.finish_reason
    return [("".join(texts[choice]), reasons[choice]) for choice in sorted(texts)]


async def _stream(
    deltas: AsyncGenerator[ChoiceDelta, None],
    form: AnswerFormat,
    usage: Usage,
    *,
    include_usage: bool,
) -> AsyncGenerator[bytes, None]:
    """Raises what the engine refuses the request with; once begun, tells errors in band."""
    begun: set[int] = set()
    async with aclosing(deltas):
        try:
            async for choice, delta in deltas:
                usage.count(choice, delta)
                piece = b"" if choice in begun else form.opening(choice)
                if delta.text or delta.finish_reason is not None:
                    piece += form.chunk(choice, delta.text, delta.finish_reason)
                if piece or not begun:  # a first token lets the headers go, text or not
                    begun.add(choice)
                    yield piece
        except Exception as error:
            if not begun:
                raise
            yield sse(error_body(as_cb_error(error)))
            return
    if include_usage:
        yield form.usage_chunk(usage)
    yield DONE
