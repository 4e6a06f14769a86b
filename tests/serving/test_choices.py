"""Several choices of one prompt, over an engine in this process and over a runner's socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai.types.chat import ChatCompletion

from cb_backend.core.sampling_params import SamplingParams
from cb_backend.errors import InvalidRequestError
from cb_backend.serving.engine_client import EngineClient, GenerateRequest, LocalClient
from cb_backend.serving.remote_client import RemoteClient
from cb_backend.serving.text_codec import TextCodec
from tests.serving.conftest import (
    Gate,
    Script,
    WatchedEngine,
    chat,
    completion,
    gateway,
    running_engine,
    served,
    sse_objects,
    until,
    until_idle,
)
from tests.serving.remote import runner

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


@pytest.fixture(params=["local", "remote"])
async def client(
    request: pytest.FixtureRequest, engine: WatchedEngine, tmp_path: Path
) -> AsyncIterator[EngineClient]:
    if request.param == "local":
        yield LocalClient(engine)
        return
    async with served(runner(engine).application(), tmp_path / "s"):
        remote = RemoteClient(f"file://{tmp_path / 's'}")
        yield remote
        await remote.close()


@pytest.fixture
async def http(client: EngineClient, codec: TextCodec) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(gateway(client, codec))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
        yield http


async def answer(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Any:
    response = await http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def by_choice(events: list[Any]) -> dict[int, list[Any]]:
    choices: dict[int, list[Any]] = {}
    for event in events:
        for choice in event["choices"]:
            choices.setdefault(choice["index"], []).append(choice)
    return choices


def ends_once(chunks: list[Any]) -> bool:
    reasons = [chunk["finish_reason"] for chunk in chunks]
    return reasons[-1] is not None and set(reasons[:-1]) <= {None}


async def test_a_chat_has_n_choices_and_its_prompt_counts_once(
    http: httpx.AsyncClient, script: Script
) -> None:
    one = await answer(http, CHAT, chat())
    three = await answer(http, CHAT, chat(n=3))
    parsed = ChatCompletion.model_validate(three)
    assert [choice.index for choice in parsed.choices] == [0, 1, 2]
    assert {choice.message.content for choice in parsed.choices} == {"the quick brown fox"}
    assert three["usage"]["prompt_tokens"] == one["usage"]["prompt_tokens"]
    assert three["usage"]["completion_tokens"] == 3 * one["usage"]["completion_tokens"]
    total = three["usage"]["prompt_tokens"] + three["usage"]["completion_tokens"]
    assert three["usage"]["total_tokens"] == total


async def test_a_streamed_choice_opens_and_ends_exactly_once(http: httpx.AsyncClient) -> None:
    response = await http.post(CHAT, json=chat(n=3, stream=True))
    choices = by_choice(sse_objects(response.text))
    assert set(choices) == {0, 1, 2}
    for chunks in choices.values():
        assert ends_once(chunks)
        assert [chunk["delta"].get("role") for chunk in chunks[:1]] == ["assistant"]
        assert not any("role" in chunk["delta"] for chunk in chunks[1:])
        text = "".join(chunk["delta"].get("content", "") for chunk in chunks)
        assert text == "the quick brown fox"


async def test_choices_of_several_prompts_follow_each_other(http: httpx.AsyncClient) -> None:
    prompts = ["one<|go|>", "two three<|go|>"]
    whole = await answer(http, COMPLETIONS, completion(prompts, n=2))
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
    alone = [await answer(http, COMPLETIONS, completion(prompt)) for prompt in prompts]
    counted = sum(one["usage"]["prompt_tokens"] for one in alone)
    assert whole["usage"]["prompt_tokens"] == counted
    streamed = await http.post(COMPLETIONS, json=completion(prompts, n=2, stream=True))
    choices = by_choice(sse_objects(streamed.text))
    assert set(choices) == {0, 1, 2, 3}
    assert all(ends_once(chunks) for chunks in choices.values())


async def test_the_prompt_is_computed_once(
    http: httpx.AsyncClient, engine: WatchedEngine, script: Script
) -> None:
    usage = (await answer(http, CHAT, chat(n=4)))["usage"]
    num_prompt, num_output = usage["prompt_tokens"], usage["completion_tokens"] // 4
    # A fork computes the prompt's last token again; nobody computes the last token of an output.
    assert engine.stats().computed_tokens == num_prompt + 3 + 4 * (num_output - 1)
    assert usage["cb_cost"]["tokens_saved"] == 3 * (num_prompt - 1)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0


async def test_a_client_that_leaves_ends_all_choices(
    http: httpx.AsyncClient, engine: WatchedEngine, script: Script
) -> None:
    script.before_step = gate = Gate()
    asked = asyncio.create_task(http.post(CHAT, json=chat(n=3)))
    await until(gate.reached.is_set)
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    await until(lambda: script.aborted == 3)
    gate.open()
    await until_idle(engine)
    assert engine.stats().generated_tokens <= 1


async def test_choices_that_do_not_fit_together_all_end(
    http: httpx.AsyncClient, engine: WatchedEngine
) -> None:
    body = chat(n=8, ignore_eos=True, max_tokens=120)
    answers = await asyncio.gather(*(answer(http, CHAT, body) for _ in range(3)))
    for one in answers:
        assert one["usage"]["completion_tokens"] == 8 * 120
        assert {choice["finish_reason"] for choice in one["choices"]} == {"length"}
        assert len({choice["message"]["content"] for choice in one["choices"]}) == 1
    assert engine.stats().preemptions > 0
    await until_idle(engine)


async def test_a_stream_that_is_closed_ends_its_choice_alone(
    client: EngineClient, engine: WatchedEngine, script: Script
) -> None:
    first, second = await client.open(request_for(script, n=2))
    await first.aclose()
    tokens = [token async for event in second for token in event.token_ids]
    assert tokens == [*script.token_ids, script.id_of("<|end|>")]
    await until_idle(engine)


async def test_the_cost_of_a_choice_that_is_ended_early_is_known(
    client: EngineClient, script: Script
) -> None:
    script.say("the quick brown fox " * 20)
    gate = Gate()  # the second step waits until the abort is in the inbox
    script.before_step = lambda plan: gate(plan) if plan.step > 1 else None
    (stream,) = await client.open(request_for(script))
    await anext(stream)
    await asyncio.to_thread(gate.reached.wait, 10.0)
    ended = asyncio.ensure_future(stream.end())
    await until(lambda: script.aborted == 1)
    gate.open()
    cost = await ended
    assert cost is not None
    assert cost.device_seconds > 0


async def test_generate_is_for_one_choice(client: EngineClient, script: Script) -> None:
    with pytest.raises(InvalidRequestError, match="n is 2"):
        await anext(client.generate(request_for(script, n=2)))


async def test_choices_of_which_some_are_refused_are_refused_together(
    codec: TextCodec, script: Script
) -> None:
    script.before_step = gate = Gate()
    with running_engine(script, max_num_seqs=1, max_num_waiting=1) as engine:
        transport = httpx.ASGITransport(gateway(LocalClient(engine), codec))
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
            running = asyncio.create_task(answer(http, CHAT, chat()))
            await until(gate.reached.is_set)
            refused = asyncio.create_task(http.post(CHAT, json=chat(n=3)))
            await until(lambda: engine.num_live == 4)
            gate.open()
            assert (await refused).status_code == 429
            await running
        await until_idle(engine)


@pytest.mark.parametrize("n", [0, 17, 10**9])
async def test_the_engines_border_limits_n(client: EngineClient, script: Script, n: int) -> None:
    with pytest.raises(InvalidRequestError, match="at most 16"):
        await client.open(request_for(script, n=n))


def request_for(script: Script, n: int = 1) -> GenerateRequest:
    prompt = script.tokenizer.encode("hi<|go|>")
    return GenerateRequest(prompt_token_ids=prompt, params=SamplingParams(temperature=0.0), n=n)
