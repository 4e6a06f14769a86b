"""Prefixes outlive the engine; a file that is bad costs nothing but them."""

from __future__ import annotations

import itertools

import pytest

from cb_backend.config import EngineConfig
from cb_backend.engine.engine import Engine
from cb_backend.engine.saved_cache import restore_cache, save_cache
from tests.fakes import ShadowExecutor, make_model_info, make_request, next_by_hashing, solo_output


def start(before: ShadowExecutor | None = None, num_blocks: int = 16) -> Engine:
    """An engine; after one that ran on `before`, it finds what that one saved."""
    executor = ShadowExecutor(make_model_info(num_blocks=num_blocks), next_token=next_by_hashing)
    if before is not None:
        executor.saved = before.saved
    config = EngineConfig(model="fake", cache_file="kept", check_invariants=True)
    ticks = itertools.count()
    engine = Engine(config, executor, clock=lambda: float(next(ticks)))
    restore_cache(engine)
    engine.check()
    return engine


def executor_of(engine: Engine) -> ShadowExecutor:
    assert isinstance(engine.executor, ShadowExecutor)
    return engine.executor


def run(engine: Engine, name: str, prompt: range) -> int:
    """Runs one request and returns how much of its prompt was cached."""
    engine.add(make_request(name, prompt, max_tokens=3))
    tokens: list[int] = []
    while engine.has_work:
        for event in engine.step():
            tokens.extend(event.token_ids)
            cached = event.num_cached_tokens
    assert tokens == solo_output(prompt, 3, next_by_hashing)
    return cached


def test_the_next_engine_finds_the_prefixes_of_the_last() -> None:
    first = start()
    assert run(first, "a", range(13)) == 0
    save_cache(first)
    second = start(executor_of(first))
    assert second.scheduler.blocks.pool.num_in_use == 0
    assert run(second, "b", range(13)) == 12


def test_a_pinned_prefix_is_saved_with_the_others() -> None:
    first = start()
    first.add(make_request("pinned", range(13), max_tokens=1, pin_s=1e9))
    while first.has_work:
        first.step()
    assert first.scheduler.blocks.pool.num_in_use == 3
    save_cache(first)
    assert run(start(executor_of(first)), "b", range(13)) == 12


def test_a_smaller_pool_keeps_the_most_recently_used() -> None:
    first = start()
    run(first, "old", range(100, 113))
    run(first, "new", range(13))
    save_cache(first)
    second = start(executor_of(first), num_blocks=4)
    assert second.scheduler.blocks.pool.num_available == 4
    assert run(second, "b", range(9)) > 0


def test_what_was_restored_may_be_evicted() -> None:
    first = start()
    run(first, "a", range(13))
    save_cache(first)
    second = start(executor_of(first), num_blocks=6)
    run(second, "crowd", range(100, 120))
    assert run(second, "a", range(13)) < 12


@pytest.mark.parametrize("method", ["load_blocks", "save_blocks"])
def test_a_file_that_cannot_be_used_is_logged_and_passed_over(
    method: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*arguments: object) -> None:
        raise OSError("no space left on device")

    first = start()
    run(first, "a", range(13))
    save_cache(first)
    monkeypatch.setattr(ShadowExecutor, method, fail)
    second = start(executor_of(first))
    run(second, "b", range(13))
    save_cache(second)
    assert "no space left on device" in caplog.text
    assert second.scheduler.blocks.pool.num_in_use == 0


def test_without_a_file_nothing_is_kept() -> None:
    executor = ShadowExecutor()
    engine = Engine(EngineConfig(model="fake"), executor, clock=lambda: 0.0)
    restore_cache(engine)
    save_cache(engine)
    assert executor.saved == {}
