"""Engine threads for tests, and what makes them wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from cb_backend.config import EngineConfig
from cb_backend.core.step_io import StepPlan
from cb_backend.engine.engine import Engine
from cb_backend.engine.engine_thread import EngineThread
from cb_backend.engine.lifecycle import EngineStatus
from tests.fakes import (
    ShadowExecutor,
)

Start = Callable[..., EngineThread]


def eventually(condition: Callable[[], bool]) -> None:
    """Another thread is about to make this true; the limit is for a test that fails."""
    gate, deadline = threading.Event(), time.monotonic() + 10.0
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        gate.wait(0.001)


@pytest.fixture
def start() -> Iterator[Start]:
    threads: list[EngineThread] = []

    def start_thread(
        executor: ShadowExecutor | Callable[[], ShadowExecutor],
        *,
        step_timeout_s: float = 30.0,
        drain_timeout_s: float = 10.0,
        **settings: object,
    ) -> EngineThread:
        def build() -> Engine:
            made = executor() if callable(executor) else executor
            config = EngineConfig(model="fake", check_invariants=True, **settings)  # type: ignore[arg-type]
            return Engine(config, made, clock=time.monotonic)

        thread = EngineThread(build, step_timeout_s=step_timeout_s, drain_timeout_s=drain_timeout_s)
        threads.append(thread)
        thread.start()
        return thread

    yield start_thread
    for thread in threads:
        thread.close()


def ready(thread: EngineThread) -> EngineThread:
    eventually(lambda: thread.life.status is not EngineStatus.LOADING)
    assert thread.life.status is EngineStatus.READY
    return thread


class Gate:
    """A step waits here until it is opened; `reached` tells that it does."""

    def __init__(self) -> None:
        self.reached, self._open = threading.Event(), threading.Event()

    def __call__(self, plan: StepPlan) -> None:
        self.reached.set()
        assert self._open.wait(20.0)

    def open(self) -> None:
        self._open.set()
