"""What may be asked of a running engine between two steps."""

from __future__ import annotations

import itertools
import threading

import pytest

from cb_backend.config import EngineConfig
from cb_backend.engine.controls import (
    explain_requests,
    mind_neighbours,
    resize_kv_pool,
    use_policy,
)
from cb_backend.engine.engine import Engine
from cb_backend.errors import ConfigError, InvalidRequestError, WrongThreadError
from tests.fakes import ShadowExecutor, make_model_info, make_request, solo_output

GIB = 2**30


def start(**settings: object) -> tuple[Engine, ShadowExecutor]:
    executor = ShadowExecutor(make_model_info(num_blocks=64, block_size=4, max_model_len=40))
    config = EngineConfig(model="fake", check_invariants=True, **settings)  # type: ignore[arg-type]
    ticks = itertools.count()
    return Engine(config, executor, clock=lambda: float(next(ticks))), executor


def run(engine: Engine) -> dict[str, list[int]]:
    outputs: dict[str, list[int]] = {}
    while engine.has_work:
        for event in engine.step():
            outputs.setdefault(event.request_id, []).extend(event.token_ids)
    return outputs


def test_a_policy_takes_effect_with_the_next_step() -> None:
    engine, _ = start(max_num_seqs=1, max_num_batched_tokens=8)
    engine.add(make_request("first", [1], max_tokens=1, priority=0))
    engine.add(make_request("urgent", [5], max_tokens=1, priority=9))
    use_policy(engine, "priority")
    assert list(run(engine)) == ["urgent", "first"]


def test_an_unknown_policy_changes_nothing() -> None:
    engine, _ = start()
    with pytest.raises(ConfigError, match="lifo"):
        use_policy(engine, "lifo")
    assert engine.scheduler.roster.policy.name == "fcfs"


def test_explain_shows_every_live_request() -> None:
    engine, _ = start(max_num_seqs=1, max_num_batched_tokens=8)
    for name in "ab":
        engine.add(make_request(name, [1], max_tokens=9))
    engine.step()
    assert [(v.request_id, v.state) for v in explain_requests(engine)] == [
        ("a", "running"),
        ("b", "waiting"),
    ]


@pytest.mark.parametrize("num_blocks", [10, 11, 64, 200])
def test_the_pool_changes_its_size_under_running_requests(num_blocks: int) -> None:
    engine, executor = start()
    for number in range(6):
        engine.add(make_request(str(number), [10 * number], max_tokens=30))
    for _ in range(9):
        events = engine.step()
    assert all(event.finish_reason is None for event in events)
    resize_kv_pool(engine, num_blocks)
    assert executor.resizes[-1].num_blocks == num_blocks
    outputs = run(engine)
    for number in range(6):
        assert outputs[str(number)] == solo_output([10 * number], 30)[9:]


def test_a_pool_that_could_not_hold_the_longest_request_is_refused() -> None:
    engine, executor = start()
    with pytest.raises(InvalidRequestError, match=r"at least 10, .* got 9"):
        resize_kv_pool(engine, 9)
    assert executor.resizes == []


def test_memory_is_given_to_a_neighbour_and_taken_back() -> None:
    engine, executor = start(min_free_gib=1.0)
    pool = engine.scheduler.blocks.pool
    executor.free = GIB
    mind_neighbours(engine)
    assert pool.num_blocks == 64
    executor.free = GIB - 1  # a neighbour has come
    mind_neighbours(engine)
    assert pool.num_blocks == 60
    executor.free = 0
    mind_neighbours(engine)
    assert pool.num_blocks == 10, "what one request may need is never given away"
    executor.free = 2 * GIB  # it has gone
    for _ in range(20):
        mind_neighbours(engine)
    assert pool.num_blocks == 64


def test_without_a_limit_the_pool_keeps_its_size() -> None:
    engine, executor = start()
    executor.free = 0
    mind_neighbours(engine)
    assert executor.resizes == []


def test_no_control_works_from_another_thread() -> None:
    engine, _ = start()
    caught: list[WrongThreadError] = []

    def touch() -> None:
        for control in (
            lambda: use_policy(engine, "fair"),
            lambda: explain_requests(engine),
            lambda: resize_kv_pool(engine, 20),
            lambda: mind_neighbours(engine),
        ):
            try:
                control()
            except WrongThreadError as error:
                caught.append(error)

    thread = threading.Thread(target=touch)
    thread.start()
    thread.join()
    assert len(caught) == 4
