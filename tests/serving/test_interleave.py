from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from cb_backend.serving.interleave import interleave

pytestmark = pytest.mark.anyio


class Source:
    """Counts to `length`, then raises `error` if there is one; knows whether it was closed."""

    def __init__(self, length: int, error: Exception | None = None) -> None:
        self.closed = False
        self._length = length
        self._error = error

    async def items(self) -> AsyncGenerator[int, None]:
        try:
            for number in range(self._length):
                await asyncio.sleep(0)
                yield number
            if self._error is not None:
                raise self._error
        finally:
            self.closed = True


@pytest.mark.parametrize("lengths", [[5], [0], [3, 0, 7], [1] * 20])
async def test_each_sources_items_arrive_all_and_in_order(lengths: list[int]) -> None:
    arrived: dict[int, list[int]] = {index: [] for index in range(len(lengths))}
    async for index, item in interleave([Source(length).items() for length in lengths]):
        arrived[index].append(item)
    assert arrived == {index: list(range(length)) for index, length in enumerate(lengths)}


@pytest.mark.parametrize("others", [0, 2])
async def test_the_first_error_ends_all(others: int) -> None:
    sources = [Source(2, ValueError("broken")), *(Source(10**9) for _ in range(others))]

    async def read() -> None:
        async for _ in interleave([source.items() for source in sources]):
            pass

    with pytest.raises(ValueError, match="broken"):
        await read()
    assert all(source.closed for source in sources)


@pytest.mark.parametrize("count", [1, 3])
async def test_leaving_early_closes_every_source(count: int) -> None:
    sources = [Source(10**9) for _ in range(count)]
    async with aclosing(interleave([source.items() for source in sources])) as items:
        for _ in range(10):
            await anext(items)
    assert all(source.closed for source in sources)


async def test_a_slow_consumer_has_no_source_run_ahead() -> None:
    asked = [0, 0, 0]

    async def count(index: int) -> AsyncGenerator[int, None]:
        while True:
            asked[index] += 1
            yield asked[index]

    async with aclosing(interleave([count(index) for index in range(3)])) as items:
        for taken in range(1, 10):
            await anext(items)
            for _ in range(10):
                await asyncio.sleep(0)
            # One has been taken from each before two are from any, and one more waits at each.
            assert max(asked) <= (taken - 1) // 3 + 2
