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
    """Items with their source's index. The first error ends all; so does leaving early."""
    if len(sources) == 1:
        async with aclosing(sources[0]) as source:
            async for item in source:
                yield 0, item
        return
    # Room for one: a slow consumer holds up the sources, and they merge what nobody reads.
    arrivals: asyncio.Queue[tuple[int, T] | Exception | None] = asyncio.Queue(maxsize=1)
    tasks = [
        asyncio.ensure_future(_read(index, source, arrivals))
        for index, source in enumerate(sources)
    ]
    try:
        running = len(tasks)
        while running:
            arrival = await arrivals.get()
            if isinstance(arrival, Exception):
                raise arrival
            if arrival is None:
                running -= 1
            else:
                yield arrival
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _read(
    index: int,
    source: AsyncGenerator[T, None],
    arrivals: asyncio.Queue[tuple[int, T] | Exception | None],
) -> None:
    try:
        async with aclosing(source):
            async for item in source:
                await arrivals.put((index, item))
    except Exception as error:
        await arrivals.put(error)
    else:
        await arrivals.put(None)
