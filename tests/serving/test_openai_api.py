"""The OpenAI routes over a real engine that speaks from a script."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from cb_backend.core.request import FinishReason
from cb_backend.core.step_io import ModelInfo, TokenEvent
from cb_backend.errors import (
    CBError,
    EngineDeadError,
    EngineNotReadyError,
    OverloadedError,
    RequestFailedError,
)
from cb_backend.serving.async_engine import AsyncEngine
from cb_backend.serving.engine_client import EngineHealth, GenerateRequest, LocalClient
from cb_backend.serving.openai_api import OpenAIRoutes
from cb_backend.serving.text_codec import TextCodec
from tests.fakes import make_model_info
from tests.serving.conftest import (
    CONTEXT,
    MODEL,
    Gate,
    Script,
    chat,
    completion,
    gateway,
    sse_objects,
    until_idle,
)

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


async def stream_of(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[Any]:
    response = await http.post(path, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return sse_objects(response.text)


def text_of(events: list[Any]) -> str:
    choices = [choice for event in events for choice in event["choices"]]
    return "".join(c.get("text") or c.get("delta", {}).get("content") or "" for c in choices)


async def whole(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Any:
    response = await http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def test_a_chat_answer_has_openais_form(http: httpx.AsyncClient, script: Script) -> None:
    script.say("the quick brown fox")
    answer = await whole(http, CHAT, chat("hi", model=MODEL))
    parsed = ChatCompletion.model_validate(answer, strict=True)
    assert parsed.choices[0].message.content == "the quick brown fox"
    assert parsed.choices[0].finish_reason == "stop"
    assert parsed.usage is not None
    # The end token is counted and not shown.
    assert parsed.usage.completion_tokens == len(script.token_ids) + 1
    assert parsed.usage.total_tokens == parsed.usage.prompt_tokens + len(script.token_ids) + 1


async def test_a_completion_has_openais_form(http: httpx.AsyncClient, script: Script) -> None:
    parsed = Completion.model_validate(await whole(http, COMPLETIONS, completion()), strict=True)
    assert parsed.object == "text_completion"
    assert parsed.choices[0].text == "the quick brown fox"


@pytest.mark.parametrize("text", ["the quick brown fox", "客单价 👩‍👩‍👧 ď", "", "one\ntwo"])
async def test_a_stream_adds_up_to_the_answer(
    http: httpx.AsyncClient, script: Script, text: str
) -> None:
    script.say(text)
    events = await stream_of(http, CHAT, chat())
    assert text_of(events) == text
    assert not any("\ufffd" in json.dumps(event, ensure_ascii=False) for event in events)
    assert (await whole(http, CHAT, chat()))["choices"][0]["message"]["content"] == text
    assert text_of(await stream_of(http, COMPLETIONS, completion())) == text


async def test_a_chat_stream_has_openais_form(http: httpx.AsyncClient) -> None:
    events = await stream_of(http, CHAT, chat())
    parsed = [ChatCompletionChunk.model_validate(event, strict=True) for event in events]
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert len({chunk.id for chunk in parsed}) == 1
    assert all(chunk.choices[0].index == 0 for chunk in parsed)
    # The key is there, null until the last.
    reasons = [event["choices"][0]["finish_reason"] for event in events]
    assert reasons == [None] * (len(reasons) - 1) + ["stop"]
    assert all("role" not in event["choices"][0]["delta"] for event in events[1:])


@pytest.mark.parametrize(
    ("options", "has_usage"),
    [
        (None, False),
        ({}, False),
        ({"include_usage": False}, False),
        ({"include_usage": True}, True),
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_usage_comes_in_a_last_chunk_without_choices_and_only_when_asked_for(
    http: httpx.AsyncClient, path: str, options: dict[str, bool] | None, has_usage: bool
) -> None:
    body = chat() if path == CHAT else completion()
    events = await stream_of(http, path, {**body, "stream_options": options})
    assert [bool(event.get("usage")) for event in events] == [False] * (len(events) - 1) + [
        has_usage
    ]
    if has_usage:
        assert events[-1]["choices"] == []
        assert events[-1]["usage"] == (await whole(http, path, body))["usage"] | {
            "prompt_tokens_details": events[-1]["usage"]["prompt_tokens_details"]
        }


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
async def test_exactly_max_tokens_are_made_and_the_reason_is_length(
    http: httpx.AsyncClient, script: Script, max_tokens: int, field: str
) -> None:
    answer = await whole(http, CHAT, chat(**{field: max_tokens}))
    assert answer["usage"]["completion_tokens"] == max_tokens
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["choices"][0]["message"]["content"] == script.tokenizer.decode(
        script.token_ids[:max_tokens]
    )


async def test_an_end_token_that_is_the_last_allowed_one_is_a_stop(
    http: httpx.AsyncClient, script: Script
) -> None:
    answer = await whole(http, CHAT, chat(max_tokens=len(script.token_ids) + 1))
    assert answer["choices"][0]["finish_reason"] == "stop"


async def test_a_missing_max_tokens_means_what_is_left_of_the_context(
    http: httpx.AsyncClient, script: Script
) -> None:
    script.say("the quick " * CONTEXT)
    for path, body in ((CHAT, chat()), (COMPLETIONS, completion())):
        answer = await whole(http, path, body)
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["total_tokens"] == CONTEXT


async def test_ignore_eos_goes_on_to_the_limit(http: httpx.AsyncClient, script: Script) -> None:
    answer = await whole(http, CHAT, chat(ignore_eos=True, max_tokens=40))
    assert answer["usage"]["completion_tokens"] == 40
    assert answer["choices"][0]["message"]["content"] == "the quick brown fox"


async def test_a_stop_token_id_ends_the_answer_and_is_not_shown(
    http: httpx.AsyncClient, script: Script
) -> None:
    stop_id = script.token_ids[2]
    answer = await whole(http, COMPLETIONS, completion(stop_token_ids=[stop_id]))
    assert answer["choices"][0]["text"] == script.tokenizer.decode(script.token_ids[:2])
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("stop", ["brown", "k br", ["nope", "ick"], "the quick brown fox", "t"])
async def test_a_stop_string_cuts_to_the_character_streamed_or_not(
    http: httpx.AsyncClient, stop: str | list[str]
) -> None:
    text = "the quick brown fox"
    expected = text[
        : min(text.find(s) for s in ([stop] if isinstance(stop, str) else stop) if s in text)
    ]
    answer = await whole(http, CHAT, chat(stop=stop))
    events = await stream_of(http, CHAT, chat(stop=stop))
    assert answer["choices"][0]["message"]["content"] == expected
    assert text_of(events) == expected
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert events[-1]["choices"][0]["finish_reason"] == "stop"


async def test_a_stop_string_ends_the_request_in_the_engine(
    http: httpx.AsyncClient, engine: AsyncEngine, script: Script
) -> None:
    script.say("the quick brown fox " * 20)
    gate = Gate()
    script.before_step = lambda plan: gate(plan) if engine.stats().generated_tokens >= 9 else None
    answer = await whole(http, CHAT, chat(stop=" quick"))
    gate.open()
    used = answer["usage"]["completion_tokens"]
    assert script.tokenizer.decode(script.token_ids[:used]).endswith(" quick")
    await until_idle(engine)
    assert engine.stats().finished.get(FinishReason.ABORT) == 1


async def test_text_held_back_for_a_stop_string_comes_at_the_end(http: httpx.AsyncClient) -> None:
    events = await stream_of(http, CHAT, chat(stop=["foxZZZ", "xY"]))
    assert text_of(events) == "the quick brown fox"
    assert events[-1]["choices"][0]["finish_reason"] == "stop"


async def test_a_stop_string_that_never_begins_delays_nothing(
    codec: TextCodec, script: Script
) -> None:
    events = [
        TokenEvent("1", (token_id,), step=step, time=0.0)
        for step, token_id in enumerate(script.token_ids)
    ]
    events.append(TokenEvent("1", (), step=9, time=0.0, finish_reason=FinishReason.LENGTH))
    bodies = [chat(stream=True), chat(stream=True, stop="QQQQQQQQQQQQ")]
    plain, stopped = [
        sse_objects((await answer_of(FixedEngine(events), codec, body)).text) for body in bodies
    ]
    assert len(plain) == len(events) + 1  # an opening, a chunk for each token, and the end
    assert [e["choices"][0]["delta"] for e in plain] == [e["choices"][0]["delta"] for e in stopped]


async def test_bytes_cut_in_the_middle_of_a_character_are_counted_and_shown_as_such(
    http: httpx.AsyncClient, script: Script
) -> None:
    script.token_ids = script.bytes_of("😀😀".encode())
    for max_tokens, text in ((1, "\ufffd"), (4, "😀"), (6, "😀\ufffd")):
        answer = await whole(http, CHAT, chat(max_tokens=max_tokens))
        assert answer["choices"][0]["message"]["content"] == text
        assert answer["usage"]["completion_tokens"] == max_tokens
        assert text_of(await stream_of(http, CHAT, chat(max_tokens=max_tokens))) == text


async def test_several_prompts_give_as_many_choices(http: httpx.AsyncClient) -> None:
    body = completion(["one<|go|>", "two three<|go|>", "four<|go|>"])
    answer = await whole(http, COMPLETIONS, body)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert {choice["text"] for choice in answer["choices"]} == {"the quick brown fox"}
    events = await stream_of(http, COMPLETIONS, body)
    for index in range(3):
        mine = [e["choices"][0] for e in events if e["choices"][0]["index"] == index]
        assert "".join(choice["text"] for choice in mine) == "the quick brown fox"
        # One finish reason per choice, in its last chunk.
        reasons = [choice["finish_reason"] for choice in mine]
        assert reasons == [None] * (len(mine) - 1) + ["stop"]
    alone = [await whole(http, COMPLETIONS, completion(prompt)) for prompt in body["prompt"]]
    for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert answer["usage"][count] == sum(one["usage"][count] for one in alone)


async def test_token_ids_are_a_prompt_too(http: httpx.AsyncClient, script: Script) -> None:
    ids = script.tokenizer.encode("hi<|go|>")
    as_text = await whole(http, COMPLETIONS, completion("hi<|go|>"))
    as_ids = await whole(http, COMPLETIONS, completion(ids))
    assert as_ids["usage"]["prompt_tokens"] == as_text["usage"]["prompt_tokens"] == len(ids)
    several = await whole(http, COMPLETIONS, completion([ids, ids]))
    assert len(several["choices"]) == 2


async def test_the_prefix_cache_shows_in_usage(http: httpx.AsyncClient) -> None:
    body = chat("one two three four five six seven", cache_salt="mine")
    await whole(http, CHAT, body)
    again = await whole(http, CHAT, body)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    other = await whole(http, CHAT, {**body, "cache_salt": "another tenant"})
    assert other["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_the_chat_prompt_is_the_models_template_with_one_begin_token(
    http: httpx.AsyncClient, script: Script
) -> None:
    messages = [
        {"role": "system", "content": "be brief"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "2"}],
        },
        {"role": "assistant", "content": None},
        {"role": "user", "content": ""},
    ]
    expected = script.tokenizer.apply_chat_template(
        [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "one\n2"},
            {"role": "assistant", "content": ""},
            {"role": "user", "content": ""},
        ],
        add_generation_prompt=True,
        return_dict=False,
    )
    tokens = (await whole(http, "/tokenize", {"messages": messages}))["tokens"]
    assert tokens == expected
    assert tokens.count(script.id_of("<|begin|>")) == 1
    answer = await whole(http, CHAT, {"messages": messages, "temperature": 0})
    assert answer["usage"]["prompt_tokens"] == len(expected)


async def test_tokenize_and_detokenize_are_each_others_inverse(
    http: httpx.AsyncClient, script: Script
) -> None:
    tokenized = await whole(http, "/tokenize", {"prompt": "the fox 客"})
    assert tokenized["tokens"] == script.tokenizer.encode("the fox 客")
    assert (tokenized["count"], tokenized["max_model_len"]) == (len(tokenized["tokens"]), CONTEXT)
    bare = await whole(http, "/tokenize", {"prompt": "the fox 客", "add_special_tokens": False})
    assert bare["tokens"] == tokenized["tokens"][1:]
    text = await whole(http, "/detokenize", {"tokens": tokenized["tokens"]})
    assert text == {"prompt": "the fox 客"}


async def test_the_model_is_listed_under_the_name_that_requests_use(
    http: httpx.AsyncClient,
) -> None:
    listed = (await http.get("/v1/models")).json()
    assert [model["id"] for model in listed["data"]] == [MODEL]
    assert (await http.get(f"/v1/models/{MODEL}")).json() == listed["data"][0]
    for response in (
        await http.get("/v1/models/gpt-4"),
        await http.post(CHAT, json=chat(model="gpt-4")),
        await http.post(COMPLETIONS, json=completion(model="gpt-4")),
    ):
        assert response.status_code == 404
        error = response.json()["error"]
        assert error["code"] == "model_not_found"
        assert "gpt-4" in error["message"]
        assert MODEL in error["message"]


async def test_an_unknown_route_and_a_wrong_method_answer_in_openais_form(
    http: httpx.AsyncClient,
) -> None:
    for response, status in ((await http.get("/v1/nothing"), 404), (await http.get(CHAT), 405)):
        assert response.status_code == status
        assert response.json()["error"]["type"] == "invalid_request_error"


class FixedEngine:
    """Brings `events`, one by one, and then raises `error` if there is one."""

    def __init__(self, events: Sequence[TokenEvent], error: Exception | None = None) -> None:
        self._events = events
        self._error = error

    async def model_info(self) -> ModelInfo:
        return make_model_info(max_model_len=CONTEXT)

    async def health(self) -> EngineHealth:
        return EngineHealth(True, True, "ready")

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenEvent]:
        for event in self._events:
            yield event
        if self._error is not None:
            raise self._error

    async def close(self) -> None:
        pass


async def answer_of(engine: FixedEngine, codec: TextCodec, body: dict[str, Any]) -> httpx.Response:
    transport = httpx.ASGITransport(gateway(engine, codec), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
        return await http.post(CHAT, json=body)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "code", "has_retry_after"),
    [
        (OverloadedError("4096 wait, the limit is 4096"), 429, "overloaded", True),
        (EngineNotReadyError("loading"), 503, "engine_not_ready", True),
        (EngineDeadError("crashed"), 503, "engine_dead", True),
        (RequestFailedError("step 7 failed"), 500, "request_failed", False),
        (RuntimeError("/secret/path"), 500, "internal_error", False),
    ],
)
async def test_an_error_before_the_first_token_has_its_real_status(
    codec: TextCodec,
    stream: bool,
    error: Exception,
    status: int,
    code: str,
    has_retry_after: bool,
) -> None:
    response = await answer_of(FixedEngine([], error), codec, chat(stream=stream))
    assert response.status_code == status
    assert response.json()["error"]["code"] == code
    assert ("retry-after" in response.headers) == has_retry_after
    assert "/secret" not in response.text


@pytest.mark.parametrize("error", [EngineDeadError("the engine died"), RuntimeError("/secret/x")])
async def test_an_error_inside_a_stream_is_one_event_and_the_end(
    codec: TextCodec, script: Script, error: Exception
) -> None:
    token = TokenEvent("1", (script.token_ids[0],), step=1, time=0.0)
    response = await answer_of(FixedEngine([token], error), codec, chat(stream=True))
    assert response.status_code == 200
    *_, last = response.text.removesuffix("\n\n").split("\n\n")
    told = json.loads(last.removeprefix("data: "))
    assert set(told["error"]) == {"message", "type", "param", "code"}
    assert "[DONE]" not in response.text
    assert '"finish_reason":"' not in response.text
    assert "/secret" not in response.text
    if isinstance(error, CBError):
        assert told["error"]["message"] == error.message


async def test_a_gateway_without_a_model_yet_answers_503() -> None:
    transport = httpx.ASGITransport(OpenAIRoutes().application())
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
        response = await http.get("/v1/models")
    assert response.status_code == 503


async def test_concurrent_answers_do_not_mix(engine: AsyncEngine, codec: TextCodec) -> None:
    transport = httpx.ASGITransport(gateway(LocalClient(engine), codec))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
        streams = await asyncio.gather(*(stream_of(http, CHAT, chat(f"{n}")) for n in range(60)))
    assert {text_of(events) for events in streams} == {"the quick brown fox"}
    assert len({events[0]["id"] for events in streams}) == 60
