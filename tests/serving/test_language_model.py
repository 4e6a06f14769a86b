"""What a user's own service calls: text in, text out."""

from __future__ import annotations

import asyncio

import pytest

from cb_backend.core.request import FinishReason
from cb_backend.core.sampling_params import SamplingParams
from cb_backend.errors import InvalidRequestError, PromptTooLongError, RequestFailedError
from cb_backend.serving.engine_client import GenerateRequest, LocalClient
from cb_backend.serving.language_model import LanguageModel
from cb_backend.serving.text_codec import TextCodec
from tests.engine.conftest import Gate
from tests.serving.conftest import CONTEXT, Script, WatchedEngine, until, until_idle

pytestmark = pytest.mark.anyio

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture
def model(engine: WatchedEngine, codec: TextCodec) -> LanguageModel:
    return LanguageModel(LocalClient(engine), codec)


async def test_a_chat_streams_text(model: LanguageModel) -> None:
    pieces = [piece async for piece in model.stream_chat(MESSAGES)]
    assert "".join(pieces) == "the quick brown fox"
    assert all(pieces)


async def test_sampling_is_the_callers_choice(model: LanguageModel, script: Script) -> None:
    pieces = [piece async for piece in model.stream_chat(MESSAGES, SamplingParams(max_tokens=2))]
    assert "".join(pieces) == script.tokenizer.decode(script.token_ids[:2])


async def test_breaking_out_of_the_loop_aborts_the_request(
    model: LanguageModel, engine: WatchedEngine, script: Script
) -> None:
    script.say("the quick brown fox " * 20)
    gate = Gate()
    script.before_step = lambda plan: gate(plan) if engine.stats().generated_tokens >= 3 else None
    async for _ in model.stream_chat(MESSAGES):
        break  # without aclosing: Python closes the generator when its last name goes
    await until(lambda: script.aborted == 1)
    gate.open()
    await until_idle(engine)
    assert engine.stats().finished == {FinishReason.ABORT: 1}


async def test_the_last_delta_has_the_reason_and_the_counts(
    model: LanguageModel, script: Script
) -> None:
    prompt = await model.encode("hi<|go|>")
    request = GenerateRequest(prompt_token_ids=prompt, params=SamplingParams(max_tokens=3))
    deltas = [delta async for delta in model.generate(request)]
    assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert (deltas[-1].finish_reason, deltas[-1].num_tokens) == ("length", 3)


async def test_an_empty_prompt_is_refused(model: LanguageModel) -> None:
    with pytest.raises(InvalidRequestError, match="empty"):
        await anext(model.generate(GenerateRequest(prompt_token_ids=[], params=SamplingParams())))


async def test_a_text_without_hope_is_not_tokenized(model: LanguageModel) -> None:
    with pytest.raises(PromptTooLongError, match=str(CONTEXT)):
        await model.encode("x" * 1_000_000)


async def test_a_stream_that_ends_without_a_reason_is_an_error(codec: TextCodec) -> None:
    from tests.serving.fixed_engine import FixedEngine

    model = LanguageModel(FixedEngine([]), codec)
    with pytest.raises(RequestFailedError):
        await anext(model.generate(GenerateRequest(prompt_token_ids=[1], params=SamplingParams())))


async def test_an_abort_by_the_engine_is_an_error_and_no_normal_end(
    model: LanguageModel, engine: WatchedEngine, script: Script
) -> None:
    script.say("the quick brown fox " * 20)
    prompt = await model.encode("hi<|go|>")
    request = GenerateRequest(prompt_token_ids=prompt, params=SamplingParams())
    gate = Gate()  # the second step waits until the abort is in the inbox
    script.before_step = lambda plan: gate(plan) if plan.step > 1 else None

    async def read() -> None:
        async for _ in model.generate(request):
            await asyncio.to_thread(gate.reached.wait, 10.0)
            for request_id, _ in engine.step_log()[0].rows:
                engine.abort(request_id)
            gate.open()

    with pytest.raises(RequestFailedError, match="aborted"):
        await read()
    assert engine.stats().finished == {FinishReason.ABORT: 1}
