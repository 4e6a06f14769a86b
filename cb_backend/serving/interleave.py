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
    waiting = {_ask(source): index for index, source in enumerate(sources)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=waiting.__getitem__):
                index = waiting.pop(task)
                try:
                    item = task.result()
                except StopAsyncIteration:
                    continue
                waiting[_ask(sources[index])] = index
                yield index, item
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for source in sources:
            await source.aclose()


def _ask(source: AsyncGenerator[T, None]) -> asyncio.Future[T]:
    return asyncio.ensure_future(anext(source))
