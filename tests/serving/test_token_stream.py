from __future__ import annotations

import asyncio

import pytest

from cb_backend.core.request import FinishReason, RequestCost
from cb_backend.core.step_io import TokenEvent
from cb_backend.errors import ErrorInfo, RequestFailedError
from cb_backend.serving.token_stream import LoopReceiver, TokenStream

pytestmark = pytest.mark.anyio


def event(
    *token_ids: int, finish: FinishReason | None = None, error: ErrorInfo | None = None
) -> TokenEvent:
    return TokenEvent(
        request_id="a",
        token_ids=token_ids,
        step=1,
        time=0.0,
        finish_reason=finish,
        error=error,
    )


class Drops:
    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1


async def test_events_arrive_in_order_and_the_stream_ends_after_the_terminal_one() -> None:
    stream = TokenStream(on_drop=Drops())
    seen = []
    stream.put(event(1))
    async for got in stream:
        seen.append((got.token_ids, got.finish_reason))
        if len(seen) == 1:
            stream.put(event(2, finish=FinishReason.STOP))
    assert seen == [((1,), None), ((2,), FinishReason.STOP)]


async def test_a_slow_reader_gets_unread_events_merged_into_one() -> None:
    stream = TokenStream(on_drop=Drops())
    for token_id in range(1000):
        stream.put(event(token_id))
    stream.put(event(1000, finish=FinishReason.LENGTH))
    events = [got async for got in stream]
    assert [got.token_ids for got in events] == [tuple(range(1001))]
    assert events[0].finish_reason is FinishReason.LENGTH


async def test_a_waiting_reader_is_woken() -> None:
    stream = TokenStream(on_drop=Drops())
    reader = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    assert not reader.done()
    stream.put(event(5))
    assert (await reader).token_ids == (5,)


async def test_an_error_is_raised_after_the_tokens_that_came_before_it() -> None:
    stream = TokenStream(on_drop=Drops())
    stream.put(event(1))
    stream.put(event(finish=FinishReason.ERROR, error=ErrorInfo("request_failed", "boom")))
    assert (await anext(stream)).token_ids == (1,)
    with pytest.raises(RequestFailedError, match="boom"):
        await anext(stream)
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_leaving_early_drops_the_request_once() -> None:
    drops = Drops()
    stream = TokenStream(on_drop=drops)
    stream.put(event(1))
    await anext(stream)
    await stream.aclose()
    await stream.aclose()
    assert drops.count == 1
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_leaving_after_the_end_drops_nothing_even_if_the_end_was_not_read() -> None:
    drops = Drops()
    stream = TokenStream(on_drop=drops)
    stream.put(event(1, finish=FinishReason.STOP))
    await stream.aclose()
    assert drops.count == 0


async def test_a_cancelled_reader_can_be_followed_by_another() -> None:
    stream = TokenStream(on_drop=Drops())
    reader = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    reader.cancel()
    await asyncio.gather(reader, return_exceptions=True)
    stream.put(event(3))
    assert (await anext(stream)).token_ids == (3,)


async def test_an_event_after_the_last_one_is_a_bug_that_shows() -> None:
    stream = TokenStream(on_drop=Drops())
    stream.put(event(1, finish=FinishReason.STOP))
    with pytest.raises(AssertionError, match="after the last one"):
        stream.put(event(2))


async def test_a_batch_from_another_thread_arrives_on_the_loop_at_once() -> None:
    arrived: asyncio.Queue[list[TokenEvent]] = asyncio.Queue()
    receiver = LoopReceiver(asyncio.get_running_loop(), arrived.put_nowait)
    assert await asyncio.to_thread(receiver.deliver, [event(1), event(2)])
    assert [got.token_ids for got in await arrived.get()] == [(1,), (2,)]


def test_a_receiver_of_a_closed_loop_says_that_it_is_gone() -> None:
    loop = asyncio.new_event_loop()
    loop.close()
    assert not LoopReceiver(loop, lambda events: None).deliver([event(1)])


async def test_ending_a_stream_drops_it_once_and_waits_for_what_it_took() -> None:
    drops = Drops()
    stream = TokenStream(on_drop=drops)
    stream.put(event(1))
    ending = asyncio.ensure_future(stream.end())
    await asyncio.sleep(0)
    assert drops.count == 1
    cost = RequestCost(0.5, 2.0, 1)
    stream.put(event(finish=FinishReason.ABORT)._replace(cost=cost))
    assert await ending == cost
    await stream.aclose()
    assert drops.count == 1


async def test_a_stream_that_fails_while_it_is_ended_has_no_known_cost() -> None:
    stream = TokenStream(on_drop=Drops())
    stream.put(event(finish=FinishReason.ERROR, error=ErrorInfo("engine_dead", "it died")))
    assert await stream.end() is None


async def test_every_event_is_told_before_it_is_merged_even_after_the_reader_left() -> None:
    told: list[TokenEvent] = []
    stream = TokenStream(on_drop=Drops())
    stream.on_event = told.append
    stream.put(event(1))
    stream.put(event(2))
    await stream.aclose()
    stream.put(event(finish=FinishReason.ABORT))
    assert [one.token_ids for one in told] == [(1,), (2,), ()]
    assert not stream.has_unread
