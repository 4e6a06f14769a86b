"""The engine's border on a real engine thread, with an executor that needs no model."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from cb_backend.config import EngineConfig
from cb_backend.core.request import FinishReason
from cb_backend.core.sampling_params import SamplingParams
from cb_backend.engine.engine import Engine
from cb_backend.engine.engine_thread import EngineThread
from cb_backend.errors import (
    EngineDeadError,
    InvalidRequestError,
    OverloadedError,
    PromptTooLongError,
    RequestFailedError,
)
from cb_backend.serving.async_engine import AsyncEngine
from cb_backend.serving.engine_client import GenerateRequest
from tests.engine.conftest import Gate, eventually
from tests.fakes import VOCAB_SIZE, ShadowExecutor, make_model_info, solo_output

pytestmark = pytest.mark.anyio


def greedy(prompt: list[int], max_tokens: int | None = 8, **fields: object) -> GenerateRequest:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    return GenerateRequest(prompt_token_ids=prompt, params=params, **fields)  # type: ignore[arg-type]


def start_engine(
    executor: ShadowExecutor, *, step_timeout_s: float = 30.0, **settings: int
) -> AsyncEngine:
    config = EngineConfig(model="fake", check_invariants=True, **settings)  # type: ignore[arg-type]
    thread = EngineThread(
        lambda: Engine(config, executor, clock=time.monotonic),
        step_timeout_s=step_timeout_s,
        drain_timeout_s=10.0,
    )
    thread.start()
    engine = AsyncEngine(config, thread)
    eventually(lambda: engine.is_ready)
    return engine


@pytest.fixture
async def engine() -> AsyncIterator[AsyncEngine]:
    engine = start_engine(ShadowExecutor(make_model_info(eos_token_ids=(500,))))
    yield engine
    await asyncio.to_thread(engine.close)


async def tokens_of(engine: AsyncEngine, request: GenerateRequest) -> list[int]:
    return [t async for event in engine.generate(request) for t in event.token_ids]


async def test_a_hundred_streams_at_once_each_get_their_own_tokens(engine: AsyncEngine) -> None:
    outputs = await asyncio.gather(*(tokens_of(engine, greedy([n, n + 1])) for n in range(100)))
    assert outputs == [solo_output([n, n + 1], 8) for n in range(100)]


async def test_the_models_end_token_ends_the_stream_unless_told_otherwise(
    engine: AsyncEngine,
) -> None:
    events = [event async for event in engine.generate(greedy([496], 9))]
    assert events[-1].finish_reason is FinishReason.STOP
    assert [t for e in events for t in e.token_ids] == [497, 498, 499, 500]
    params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
    request = GenerateRequest(prompt_token_ids=[496], params=params)
    assert await tokens_of(engine, request) == list(range(497, 506))


async def test_a_missing_max_tokens_means_what_is_left_of_the_context(engine: AsyncEngine) -> None:
    assert len(await tokens_of(engine, greedy([600], None))) == 64 * 4 - 1


@pytest.mark.parametrize(
    ("request_", "error", "field", "message"),
    [
        (greedy([]), InvalidRequestError, "prompt", "at least 1 token, got 0"),
        (greedy([-1]), InvalidRequestError, "prompt", "token id -1; ids must be integers from 0"),
        (greedy([VOCAB_SIZE]), InvalidRequestError, "prompt", f"from 0 to {VOCAB_SIZE - 1}"),
        (greedy([True]), InvalidRequestError, "prompt", "token id True"),
        (greedy([1.0]), InvalidRequestError, "prompt", "token id 1.0"),  # type: ignore[list-item]
        (greedy([1] * 256), PromptTooLongError, "prompt", "256 tokens, .* at most 255"),
        (greedy([1] * 9999), PromptTooLongError, "prompt", "9999 tokens, .* context of 256"),
        (
            greedy([1] * 250, 7),
            PromptTooLongError,
            "max_tokens",
            "250 tokens .* 7 more.* at most 6",
        ),
        (greedy([1], priority=2**31), InvalidRequestError, "priority", "at most 2147483647"),
        (greedy([1], cache_salt="x" * 257), InvalidRequestError, "cache_salt", "at most 256"),
    ],
)
async def test_bad_input_is_refused_by_name_and_disturbs_nobody(
    engine: AsyncEngine,
    request_: GenerateRequest,
    error: type[InvalidRequestError],
    field: str,
    message: str,
) -> None:
    beside = asyncio.ensure_future(tokens_of(engine, greedy([1], 100)))
    with pytest.raises(error, match=message) as caught:
        await tokens_of(engine, request_)
    assert caught.value.field == field
    assert await beside == solo_output([1], 100)


async def test_a_stop_token_outside_the_vocabulary_is_refused(engine: AsyncEngine) -> None:
    params = SamplingParams(stop_token_ids=(VOCAB_SIZE,))
    with pytest.raises(InvalidRequestError, match="stop_token_ids has the token id 1000"):
        await tokens_of(engine, GenerateRequest(prompt_token_ids=[1], params=params))


async def test_the_largest_request_that_fits_is_served(engine: AsyncEngine) -> None:
    assert await tokens_of(engine, greedy([7] * 255, 1)) == [8]
    assert len(await tokens_of(engine, greedy([7] * 250, 6))) == 6


@pytest.mark.parametrize("read_first", [True, False])
async def test_a_reader_that_leaves_frees_its_blocks_within_one_step(read_first: bool) -> None:
    gate = Gate()
    executor = ShadowExecutor(before_step=lambda plan: gate(plan) if plan.step > 1 else None)
    engine = start_engine(executor)
    stream = engine.generate(greedy([1], 200))
    reader = asyncio.ensure_future(anext(stream))
    if read_first:
        assert (await reader).token_ids == (2,)
    await asyncio.to_thread(gate.reached.wait, 10.0)
    if not read_first:
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
    await stream.aclose()
    gate.open()
    await asyncio.to_thread(eventually, lambda: engine.stats().kv_usage == 0.0)
    assert len(executor.plans) == 2, "the step that ran when the reader left, and no other"
    await asyncio.to_thread(engine.close)


async def test_a_reader_that_leaves_while_queued_is_never_computed() -> None:
    gate = Gate()
    executor = ShadowExecutor(before_step=gate)
    engine = start_engine(executor)
    running = asyncio.ensure_future(tokens_of(engine, greedy([1], 3)))
    await asyncio.to_thread(gate.reached.wait, 10.0)
    queued = asyncio.ensure_future(tokens_of(engine, greedy([9], 3)))
    await asyncio.sleep(0)
    queued.cancel()
    await asyncio.gather(queued, return_exceptions=True)
    gate.open()
    assert await running == [2, 3, 4]
    assert len({row.request_id for plan in executor.plans for row in plan.rows}) == 1
    await asyncio.to_thread(engine.close)


async def test_too_many_requests_are_refused_and_the_others_finish() -> None:
    gate = Gate()
    engine = start_engine(ShadowExecutor(before_step=gate), max_num_seqs=2, max_num_waiting=1)
    accepted = [asyncio.ensure_future(tokens_of(engine, greedy([n], 3))) for n in range(3)]
    await asyncio.to_thread(gate.reached.wait, 10.0)
    refused = asyncio.ensure_future(tokens_of(engine, greedy([1])))
    await asyncio.sleep(0)  # it is in the inbox before the step ends
    gate.open()
    with pytest.raises(OverloadedError, match="3 requests run or wait, the limit is 3") as caught:
        await refused
    assert caught.value.retry_after_s == 1.0, "nothing is measured yet"
    assert await asyncio.gather(*accepted) == [[n + 1, n + 2, n + 3] for n in range(3)]
    assert await tokens_of(engine, greedy([5], 1)) == [6]
    await asyncio.to_thread(engine.close)


async def test_the_rows_of_a_failed_step_raise_in_their_readers_only() -> None:
    def explode(plan: object) -> None:
        if len(executor.plans) == 2:
            raise RuntimeError

    executor = ShadowExecutor(before_step=explode)
    engine = start_engine(executor)
    with pytest.raises(RequestFailedError, match="failed in step 2"):
        await tokens_of(engine, greedy([1]))
    assert await tokens_of(engine, greedy([1])) == solo_output([1], 8)
    await asyncio.to_thread(engine.close)


async def test_a_hang_raises_in_every_reader_and_turns_the_engine_dead() -> None:
    gate = Gate()
    engine = start_engine(ShadowExecutor(before_step=gate), step_timeout_s=0.2)
    with pytest.raises(EngineDeadError, match="running for more than"):
        await tokens_of(engine, greedy([1]))
    assert not engine.is_ready
    assert not engine.is_alive
    assert engine.status_text.startswith("dead: a step has been running")
    with pytest.raises(EngineDeadError):
        engine.model_info()
    gate.open()
    await asyncio.to_thread(engine.close)


async def test_the_counters_of_a_dead_engine_do_not_fall() -> None:
    gate, executor = Gate(), ShadowExecutor()
    engine = start_engine(executor, step_timeout_s=0.2)
    assert await tokens_of(engine, greedy([1])) == solo_output([1], 8)
    before = engine.stats()
    executor._before_step = gate
    with pytest.raises(EngineDeadError):
        await tokens_of(engine, greedy([1]))
    assert engine.stats().generated_tokens == before.generated_tokens == 8
    gate.open()
    await asyncio.to_thread(engine.close)


class SlowLoop(asyncio.SelectorEventLoop):
    """Whoever asks it something lets other threads run meanwhile."""

    def is_closed(self) -> bool:
        time.sleep(0.001)
        return super().is_closed()


async def test_many_loops_may_begin_to_read_at_once(engine: AsyncEngine) -> None:
    def read_on_new_loops() -> None:
        for _ in range(5):
            with asyncio.Runner(loop_factory=SlowLoop) as runner:
                assert len(runner.run(tokens_of(engine, greedy([1, 2], 2)))) == 2

    with ThreadPoolExecutor(8) as pool:
        readers = [pool.submit(read_on_new_loops) for _ in range(8)]
    for reader in readers:
        reader.result()


async def test_readers_on_several_loops_get_their_own_tokens(engine: AsyncEngine) -> None:
    async def read() -> list[list[int]]:
        return await asyncio.gather(*(tokens_of(engine, greedy([n])) for n in range(10)))

    answers = await asyncio.gather(*(asyncio.to_thread(asyncio.run, read()) for _ in range(3)))
    assert answers == [[solo_output([n], 8) for n in range(10)]] * 3


async def test_unseeded_requests_draw_different_seeds_and_seeded_ones_keep_theirs() -> None:
    executor = ShadowExecutor()
    engine = start_engine(executor)
    for seed in (None, None, 7):
        params = SamplingParams(max_tokens=1, seed=seed)
        await tokens_of(engine, GenerateRequest(prompt_token_ids=[1], params=params))
    seeds = [admission.seed for plan in executor.plans for admission in plan.admitted]
    assert seeds[0] != seeds[1]
    assert seeds[2] == 7
    await asyncio.to_thread(engine.close)
