"""The OpenAI routes over a real engine that speaks from a script."""

from __future__ import annotations

import json

import httpx
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from cb_backend.core.sampling_params import SamplingParams
from cb_backend.core.step_io import Admission
from tests.serving.conftest import (
    CONTEXT,
    MODEL,
    Script,
    WatchedEngine,
    chat,
    completion,
)
from tests.serving.routes import CHAT, COMPLETIONS, stream_of, text_of, whole

pytestmark = pytest.mark.anyio


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


async def test_sampling_parameters_reach_the_engine(
    http: httpx.AsyncClient, engine: WatchedEngine, script: Script
) -> None:
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 3,
        "min_p": 0.1,
        "presence_penalty": -1,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.5,
        "seed": 7,
        "max_tokens": 9,
        "min_tokens": 2,
    }
    admitted: list[Admission] = []
    script.before_step = lambda plan: admitted.extend(plan.admitted)
    for route, body in ((CHAT, chat()), (COMPLETIONS, completion())):
        await whole(http, route, body | fields | {"logit_bias": {"5": -100, "0": 0.5}})
        assert admitted.pop().params == SamplingParams(logit_bias={5: -100, 0: 0.5}, **fields)


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
        again = (await whole(http, path, body))["usage"]
        assert events[-1]["usage"].keys() == again.keys()
        for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert events[-1]["usage"][count] == again[count]


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
