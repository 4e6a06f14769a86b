"""Streams completions from any server with OpenAI's routes, and notes when each chunk came."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from workload import Requests

Body = dict[str, Any]


class EventStream:
    """Server-sent events out of the pieces that a connection happens to deliver."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> list[bytes]:
        """The data of each event that this piece completes."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        events = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line.removeprefix(b"data:").removeprefix(b" "))
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data = []
        return events


@dataclass
class Answer:
    """All times are of time.perf_counter."""

    due: float  # when the request was to be sent: what it waits in this client counts, too
    chunk_times: list[float] = field(default_factory=list)  # of chunks with a choice in them
    num_prompt_tokens: int = 0  # as the server counts them
    num_output_tokens: int = 0
    num_cached_tokens: int = 0  # of the prompt, where the server tells
    is_done: bool = False
    error: str | None = None

    def take(self, event: bytes, now: float) -> None:
        if event == b"[DONE]":
            self.is_done = True
            return
        data = json.loads(event)
        if error := data.get("error"):
            self.error = f"in the stream: {error.get('code') or error.get('type')}"
        if data.get("choices"):
            self.chunk_times.append(now)
        if usage := data.get("usage"):
            self.num_prompt_tokens = usage["prompt_tokens"]
            self.num_output_tokens = usage["completion_tokens"]
            details = usage.get("prompt_tokens_details") or {}
            self.num_cached_tokens = details.get("cached_tokens") or 0

    def check(self, num_output_tokens: int) -> None:
        """An answer that is not whole is an error, whatever its status was."""
        if self.error is not None:
            return
        if not self.is_done:
            self.error = "cut off"
        elif self.num_output_tokens != num_output_tokens:
            self.error = "not the number of tokens that was asked for"
        elif not self.chunk_times:
            self.error = "no chunk"


@dataclass(frozen=True)
class Server:
    url: str
    model: str
    system: str  # who made the server, as it says itself
    max_model_len: int

    @classmethod
    async def at(cls, url: str) -> Server:
        async with aiohttp.ClientSession() as session, session.get(f"{url}/v1/models") as response:
            response.raise_for_status()
            model = (await response.json())["data"][0]
        return cls(url, model["id"], model["owned_by"], model["max_model_len"])

    def bodies(self, requests: Requests, cache_salt: str) -> list[Body]:
        """Greedy and to the last token. A salt of its own gives a run a cold prefix cache."""
        return [
            {
                "model": self.model,
                "prompt": prompt,
                "max_tokens": count,
                "temperature": 0.0,
                "ignore_eos": True,
                "cache_salt": cache_salt,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            for prompt, count in requests
        ]


def poisson_arrivals(rate: float, count: int, seed: int) -> list[float]:
    """Seconds after the start at which requests come, `rate` of them a second on average."""
    rng = random.Random(seed)
    clock, arrivals = 0.0, []
    for _ in range(count):
        clock += rng.expovariate(rate)
        arrivals.append(clock)
    return arrivals


async def open_loop(
    server: Server, bodies: Sequence[Body], arrivals: Sequence[float]
) -> list[Answer]:
    """Each request at its time, however many are under way."""
    async with _session() as session:
        started = time.perf_counter()

        async def at(body: Body, arrival: float) -> Answer:
            due = started + arrival
            await asyncio.sleep(due - time.perf_counter())
            return await _complete(session, server.url, body, due)

        return await _all(at(body, arrival) for body, arrival in zip(bodies, arrivals, strict=True))


async def closed_loop(server: Server, bodies: Sequence[Body], concurrency: int) -> list[Answer]:
    """So many clients, each of which sends the next request when its last one is answered."""
    async with _session() as session:
        seats = asyncio.Semaphore(concurrency)

        async def seated(body: Body) -> Answer:
            async with seats:
                return await _complete(session, server.url, body, time.perf_counter())

        return await _all(seated(body) for body in bodies)


def _session() -> aiohttp.ClientSession:
    # As many connections as requests: aiohttp's own limit of 100 would queue them in the client.
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=600)
    )


async def _all(answers: Any) -> list[Answer]:
    awaitables: list[Awaitable[Answer]] = list(answers)
    return list(await asyncio.gather(*awaitables))


async def _complete(session: aiohttp.ClientSession, url: str, body: Body, due: float) -> Answer:
    answer, events = Answer(due), EventStream()
    try:
        async with session.post(f"{url}/v1/completions", json=body) as response:
            if response.status != 200:
                answer.error = f"HTTP {response.status}"
                return answer
            async for piece in response.content.iter_any():
                now = time.perf_counter()
                for event in events.feed(piece):
                    answer.take(event, now)
    # ValueError: an event that is no JSON.
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        answer.error = type(error).__name__
    answer.check(body["max_tokens"])
    return answer
