"""Bad input gets a 4xx that names the field, and nothing beside it is disturbed."""

from __future__ import annotations

import json
from typing import Any, cast

import httpx
import pytest

from cb_backend import limits
from cb_backend.core.step_io import ModelInfo
from cb_backend.serving.engine_client import EngineClient
from cb_backend.serving.text_codec import TextCodec
from tests.fakes import VOCAB_SIZE, make_model_info
from tests.serving.conftest import CONTEXT, chat, completion, gateway
from tests.serving.routes import CHAT, COMPLETIONS

pytestmark = pytest.mark.anyio


async def refused(http: httpx.AsyncClient, path: str, body: Any, status: int = 400) -> Any:
    """The error; the engine answers as before afterwards."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = await http.post(path, content=content)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    canary = await http.post(CHAT, json=chat("canary"))
    assert canary.json()["choices"][0]["message"]["content"] == "the quick brown fox"
    return error


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("temperature", -0.1, "-0.1"),
        ("temperature", 100.5, "at most 100"),
        ("temperature", "1", "'1'"),
        ("temperature", True, "True"),
        ("temperature", [], "[]"),
        ("top_p", 0, "above 0"),
        ("top_p", 1.01, "at most 1"),
        ("top_k", -2, "-1"),
        ("top_k", 1.5, "1.5"),
        ("min_p", 2, "at most 1"),
        ("seed", 2**63, str(limits.INT64_MAX)),
        ("seed", "7", "'7'"),
        ("max_tokens", 0, "at least 1"),
        ("max_tokens", -5, "-5"),
        ("max_tokens", True, "True"),
        ("max_tokens", 2**40, str(2**31 - 1)),
        ("max_completion_tokens", 0, "at least 1"),
        ("stop", 5, "string"),
        ("stop", [""], "empty"),
        ("stop", ["a", None], "string"),
        ("stop", ["a"] * 17, "at most 16"),
        ("stop", "a" * 257, "at most 256"),
        ("stop_token_ids", [-1], "0"),
        ("stop_token_ids", [VOCAB_SIZE], str(VOCAB_SIZE)),
        ("stop_token_ids", ["1"], "'1'"),
        ("stop_token_ids", [1] * 65, "at most 64"),
        ("stream", "yes", "'yes'"),
        ("stream", 1, "1"),
        ("ignore_eos", "no", "'no'"),
        ("priority", 1.5, "1.5"),
        ("priority", 2**31, str(2**31 - 1)),
        ("cache_salt", "a" * 257, "at most 256"),
        ("stream_options", {"include_usage": True}, "stream"),
        ("stream_options", {"include_usage": "yes"}, "'yes'"),
        ("stream_options", {"more": 1}, "more"),
        ("n", 17, "at most 16"),
        ("deadline_s", 0, "above 0"),
        ("deadline_s", -1.5, "-1.5"),
        ("deadline_s", 86_401, "at most 86400"),
        ("deadline_s", "5", "'5'"),
        ("deadline_s", 10**400, "deadline_s"),
        ("pin_prefix_s", 0, "above 0"),
        ("pin_prefix_s", 86_401, "at most 86400"),
        ("pin_prefix_s", True, "True"),
        ("n", 0, "0"),
        ("n", True, "True"),
        ("logprobs", True, "not supported"),
        ("top_logprobs", 5, "not supported"),
        ("presence_penalty", 2.5, "at most 2, got 2.5"),
        ("frequency_penalty", -2.1, "at least -2"),
        ("repetition_penalty", 0, "above 0"),
        ("repetition_penalty", "1", "'1'"),
        ("logit_bias", [5], "[5]"),
        ("logit_bias", {"a": 1}, "'a'"),
        ("logit_bias", {"-1": 1}, "'-1'"),
        ("logit_bias", {"05": 1}, "'05'"),
        ("logit_bias", {str(VOCAB_SIZE): 1}, str(VOCAB_SIZE - 1)),
        ("logit_bias", {"5": 1e308}, "at most 100, got 1e+308"),
        ("logit_bias", {"5": None}, "None"),
        ("logit_bias", {str(n): 1 for n in range(1025)}, "at most 1024"),
        ("min_tokens", -1, "at least 0"),
        ("min_tokens", 301, "max_tokens"),
        ("tools", [{"type": "function"}], "not supported"),
        ("response_format", {"type": "json_object"}, "not supported"),
        ("temprature", 1, "unrecognized"),
        ("metadata", [1], "[1]"),
    ],
)
async def test_a_bad_field_is_named_with_its_value_or_limit(
    http: httpx.AsyncClient, field: str, value: Any, said: str
) -> None:
    error = await refused(http, CHAT, chat() | {field: value})
    assert error["param"] == field
    assert field in error["message"]
    assert said in error["message"]


@pytest.mark.parametrize(
    "neutral",
    [
        {"n": 1},
        {"logprobs": False},
        {"logprobs": None},
        {"top_logprobs": 0},
        {"tools": []},
        {"tool_choice": "none"},
        {"response_format": {"type": "text"}},
        {"presence_penalty": 0, "repetition_penalty": 1, "logit_bias": {}, "min_tokens": 0},
        {"user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto"},
        {"max_tokens": None, "stop": None, "seed": None, "temperature": None, "top_p": None},
        {"max_tokens": 9, "max_completion_tokens": 9},
        {"temperature": 0, "top_p": 1, "top_k": -1, "min_p": 0},
    ],
)
async def test_a_neutral_value_of_what_is_not_done_is_accepted(
    http: httpx.AsyncClient, neutral: dict[str, Any]
) -> None:
    response = await http.post(CHAT, json=chat() | neutral)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        (COMPLETIONS, "echo", True),
        (COMPLETIONS, "best_of", 2),
        (COMPLETIONS, "suffix", "tail"),
        (COMPLETIONS, "logprobs", 0),
        (COMPLETIONS, "max_completion_tokens", 5),
        (CHAT, "prompt", "hi"),
    ],
)
async def test_a_field_of_the_other_route_or_not_done_yet_is_refused(
    http: httpx.AsyncClient, path: str, field: str, value: Any
) -> None:
    body = chat() if path == CHAT else completion()
    assert (await refused(http, path, body | {field: value}))["param"] == field


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [{}],
        None,
        "x",
        {},
        [None],
        ["hi"],
        [{"role": "user"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": ["hi"]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": 5, "content": "hi"}],
        [{"role": "", "content": "hi"}],
        [{"content": "hi"}],
        [{"role": "tyrant", "content": "obey"}],
    ],
)
async def test_bad_messages_are_refused_as_such(http: httpx.AsyncClient, messages: Any) -> None:
    error = await refused(http, CHAT, {"messages": messages})
    assert error["param"] == "messages"


async def test_what_a_template_refuses_is_told_in_its_words(http: httpx.AsyncClient) -> None:
    error = await refused(http, CHAT, {"messages": [{"role": "tyrant", "content": "x"}]})
    assert "no tyrants" in error["message"]


@pytest.mark.parametrize(
    "prompt",
    [
        "",
        [""],
        ["a", ""],
        [],
        [[]],
        [[1], []],
        None,
        5,
        {},
        [1, [2]],
        [1.5],
        [True],
        ["a", 1],
        [None],
        [VOCAB_SIZE],
        [-1],
        [2**31],
        [2**63],
        [[1], [VOCAB_SIZE]],
        ["x"] * 65,
    ],
)
async def test_a_bad_prompt_is_refused_as_such(http: httpx.AsyncClient, prompt: Any) -> None:
    assert (await refused(http, COMPLETIONS, {"prompt": prompt}))["param"] == "prompt"


async def test_a_prompt_fills_the_context_but_for_one_token(
    http: httpx.AsyncClient, tokenizer: Any
) -> None:
    ids = [*([7] * (CONTEXT - 2)), tokenizer.convert_tokens_to_ids("<|go|>")]
    response = await http.post(COMPLETIONS, json=completion(ids))
    assert response.json()["usage"]["completion_tokens"] == 1
    for length in (CONTEXT, CONTEXT + 1, 10 * CONTEXT):
        error = await refused(http, COMPLETIONS, completion([7] * length))
        assert error["code"] == "context_length_exceeded"
        assert str(length) in error["message"]
        assert str(CONTEXT) in error["message"]


async def test_prompt_and_max_tokens_beyond_the_context_name_all_three_numbers(
    http: httpx.AsyncClient,
) -> None:
    ids = [7] * (CONTEXT - 10)
    error = await refused(http, COMPLETIONS, completion(ids, max_tokens=11))
    assert error["code"] == "context_length_exceeded"
    for number in (CONTEXT - 10, 11, CONTEXT):
        assert str(number) in error["message"]
    error = await refused(http, CHAT, chat("x" * 2 * CONTEXT))
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == "messages"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/tokenize"])
async def test_a_hopelessly_long_text_is_refused_before_it_is_tokenized(
    http: httpx.AsyncClient, path: str
) -> None:
    text = "x " * 500_000
    body = {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": text}
    error = await refused(http, path, body)
    assert error["code"] == "context_length_exceeded"


async def test_a_list_of_ids_beyond_the_context_never_reaches_the_engine(
    codec: TextCodec,
) -> None:
    class Client:
        async def model_info(self) -> ModelInfo:
            return make_model_info(max_model_len=CONTEXT)

        def generate(self, request: Any) -> Any:
            raise AssertionError("the engine was asked")

    transport = httpx.ASGITransport(gateway(cast("EngineClient", Client()), codec))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
        response = await http.post(COMPLETIONS, json=completion([[7], [7] * CONTEXT]))
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"


async def test_limits_that_differ_by_name_only_may_not_contradict(
    http: httpx.AsyncClient,
) -> None:
    error = await refused(http, CHAT, chat(max_tokens=5, max_completion_tokens=6))
    assert error["param"] == "max_completion_tokens"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [VOCAB_SIZE]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": ["1"]}, "tokens"),
        ("/detokenize", {"tokens": [7] * (CONTEXT + 1)}, "tokens"),
    ],
)
async def test_the_tokenizer_routes_check_their_fields(
    http: httpx.AsyncClient, path: str, body: Any, param: str
) -> None:
    assert (await refused(http, path, body))["param"] == param
