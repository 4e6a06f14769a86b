"""Several async generators read as one, in order of arrival. Asyncio loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")


async def interleave(
    sources: Sequence[AsyncGenerator[T, None]],
) -> AsyncGenerator[tuple[int, T], None]:
    """Items with their source's index. The first error ends all; so does leaving early.

    Each source is asked for one item at a time, and none is asked twice before the others were
    heard: a consumer that is slow holds them up, and they merge what nobody reads.
    """
    if len(sources) == 1:  # nearly always; no task for each item then
        async with aclosing(sources[0]) as source:
            async for item in source:
                yield 0, item
        return
    asked: dict[asyncio.Future[T], int] = {}
    # Each tells of itself once: to wait for all of them would look at every one for each item.
    done: asyncio.Queue[asyncio.Future[T]] = asyncio.Queue()

    def ask(index: int) -> None:
        task = asyncio.ensure_future(anext(sources[index]))
        task.add_done_callback(done.put_nowait)
        asked[task] = index

    for index in range(len(sources)):
        ask(index)
    try:
        while asked:
            task = await done.get()
            index = asked.pop(task)
            try:
                item = task.result()
            except StopAsyncIteration:
                continue
            ask(index)
            yield index, item
    finally:
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        for source in sources:
            await source.aclose()
