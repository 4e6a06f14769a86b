from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Iterator
from types import FrameType

import pytest

from cb_backend.serving.shutdown import on_termination

pytestmark = pytest.mark.anyio


@pytest.fixture
def server_signals() -> Iterator[list[int]]:
    """A server's own handlers, put there before ours and taken away after the test."""
    received: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        received.append(number)

    before = {n: signal.signal(n, handle) for n in (signal.SIGTERM, signal.SIGINT)}
    yield received
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_the_callback_runs_on_the_loop_and_the_server_hears_of_it_too(
    server_signals: list[int], number: signal.Signals
) -> None:
    called = asyncio.Event()
    on_termination(called.set)
    signal.raise_signal(number)
    await asyncio.wait_for(called.wait(), 5.0)
    assert server_signals == [number]


def test_another_thread_is_left_alone(server_signals: list[int]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=lambda: on_termination(lambda: None))
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is before
