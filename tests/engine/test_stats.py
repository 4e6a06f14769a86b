"""What is counted for each tenant, and what a step leaves in the log."""

from __future__ import annotations

import pytest

from cb_backend.config import EngineConfig
from cb_backend.core.request import FinishReason
from cb_backend.core.step_io import CopyKind
from cb_backend.engine.engine import Engine
from cb_backend.engine.stats import MOST_TENANTS, OTHER_TENANTS, TenantUsage
from tests.fakes import ShadowExecutor, make_model_info, make_request


class Clock:
    """A second passes each time somebody looks."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def engine_of(num_blocks: int = 64, **settings: int) -> Engine:
    config = EngineConfig(model="fake", check_invariants=True, **settings)  # type: ignore[arg-type]
    executor = ShadowExecutor(make_model_info(num_blocks=num_blocks, max_model_len=64))
    return Engine(config, executor, clock=Clock())


def run(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


def test_a_tenant_is_charged_with_all_that_its_requests_took() -> None:
    engine = engine_of()
    engine.add(make_request("a1", range(8), max_tokens=3, tenant="a"))
    engine.add(make_request("b1", range(50, 60), max_tokens=2, tenant="b"))
    run(engine)
    tenants = engine.stats().tenants
    assert {name: usage.generated_tokens for name, usage in tenants.items()} == {"a": 3, "b": 2}
    seconds = sum(record.seconds for record in engine.recorder.step_log)
    charged = sum(usage.device_seconds for usage in tenants.values())
    assert charged == pytest.approx(seconds)
    assert tenants["a"].kv_block_seconds > 0


def test_what_the_cache_saved_is_counted() -> None:
    engine = engine_of()
    for name in ("first", "second"):
        engine.add(make_request(name, range(9), max_tokens=1, tenant="a"))
        run(engine)
    assert engine.stats().tenants["a"].tokens_saved == 8


def test_an_abort_is_charged_and_a_refusal_is_not() -> None:
    engine = engine_of(max_num_seqs=1, max_num_waiting=1)
    engine.add(make_request("a1", range(8), max_tokens=9, tenant="a"))
    engine.step()
    engine.add(make_request("a2", range(8), tenant="a"))
    (event,) = engine.add(make_request("b1", range(8), tenant="b"))
    assert event.finish_reason is FinishReason.ERROR
    engine.abort("a1")
    engine.abort("a2")
    assert set(engine.stats().tenants) == {"a"}
    assert engine.stats().tenants["a"].device_seconds > 0
    assert engine.stats().tenants["a"].generated_tokens == 1


def test_tenants_past_the_limit_are_counted_together() -> None:
    engine = engine_of()
    for number in range(MOST_TENANTS + 20):
        engine.add(make_request(f"r{number}", [1, 2], max_tokens=1, tenant=f"t{number}"))
        run(engine)
    tenants = engine.stats().tenants
    assert len(tenants) == MOST_TENANTS + 1
    assert tenants[OTHER_TENANTS].generated_tokens == 20


def test_a_snapshot_does_not_change_afterwards() -> None:
    engine = engine_of()
    before = engine.stats()
    engine.add(make_request("a1", [1], max_tokens=1, tenant="a"))
    run(engine)
    assert before.tenants == {}
    assert isinstance(engine.stats().tenants["a"], TenantUsage)


def test_the_log_has_the_blocks_preemptions_and_copies_of_each_step() -> None:
    engine = engine_of(num_blocks=8)
    engine.add(make_request("p", range(6), max_tokens=16))
    engine.add(make_request("p.1", range(6), max_tokens=16, fork_of="p"))
    run(engine)
    log = engine.recorder.step_log
    assert log[0].blocks_in_use == 2
    assert [record.num_copies for record in log][:2] == [{}, {CopyKind.FORK: 1}]
    assert sum(record.num_preemptions for record in log) == engine.stats().preemptions > 0
    assert log[-1].blocks_in_use == 0
