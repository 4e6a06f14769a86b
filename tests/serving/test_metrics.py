from __future__ import annotations

import dataclasses

import pytest
from prometheus_client import CollectorRegistry

from cb_backend.core.request import FinishReason
from cb_backend.core.step_io import TokenEvent
from cb_backend.engine.stats import EngineStats, TenantUsage
from cb_backend.serving.metrics import EngineMetrics, RequestTimer


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def metrics(registry: CollectorRegistry) -> EngineMetrics:
    return EngineMetrics(registry)


STATS = EngineStats(
    num_running=3,
    num_waiting=2,
    kv_usage=0.5,
    steps=10,
    preemptions=1,
    prompt_tokens=100,
    generated_tokens=40,
    computed_tokens=124,
    cached_tokens=16,
    finished={FinishReason.STOP: 4, FinishReason.ABORT: 5},
)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("cb_requests_running", 3),
        ("vllm:num_requests_running", 3),
        ("cb_requests_waiting", 2),
        ("vllm:num_requests_waiting", 2),
        ("cb_kv_cache_usage_ratio", 0.5),
        ("vllm:kv_cache_usage_perc", 0.5),
        ("cb_prompt_tokens_total", 100),
        ("cb_generation_tokens_total", 40),
        ("cb_computed_tokens_total", 124),
        ("cb_prefix_cached_tokens_total", 16),
        ("cb_preemptions_total", 1),
        ("cb_steps_total", 10),
    ],
)
def test_the_engines_counts_are_copied_once(
    metrics: EngineMetrics, registry: CollectorRegistry, name: str, value: float
) -> None:
    for _ in range(3):
        metrics.refresh(STATS)
    assert registry.get_sample_value(name) == value


def test_aborted_requests_are_counted_as_finished(
    metrics: EngineMetrics, registry: CollectorRegistry
) -> None:
    metrics.refresh(STATS)
    metrics.refresh(dataclasses.replace(STATS, finished={**STATS.finished, FinishReason.ABORT: 6}))
    name = "cb_requests_finished_total"
    assert registry.get_sample_value(name, {"reason": "abort"}) == 6
    assert registry.get_sample_value(name, {"reason": "stop"}) == 4


def test_gauges_go_down_again(metrics: EngineMetrics, registry: CollectorRegistry) -> None:
    metrics.refresh(STATS)
    metrics.refresh(dataclasses.replace(STATS, num_running=0, kv_usage=0.0))
    assert registry.get_sample_value("cb_requests_running") == 0
    assert registry.get_sample_value("cb_kv_cache_usage_ratio") == 0


def test_a_restarted_runner_takes_back_what_the_dead_ones_gauges_say(
    metrics: EngineMetrics, registry: CollectorRegistry
) -> None:
    # As in prometheus_client's multiprocess files, which outlive the process.
    for gauges in (metrics._running, metrics._waiting, metrics._kv_usage):
        for gauge in gauges:
            gauge.set(8)
    metrics.refresh(EngineStats())
    for name in ("cb_requests_running", "cb_requests_waiting", "cb_kv_cache_usage_ratio"):
        assert registry.get_sample_value(name) == 0


def test_latencies_come_from_the_times_of_the_steps(
    metrics: EngineMetrics, registry: CollectorRegistry
) -> None:
    timer = RequestTimer(metrics, 100.0)
    timer.observe(TokenEvent("r", (1,), step=1, time=100.5))
    timer.observe(TokenEvent("r", (2,), step=2, time=100.6))
    # Merged while nobody read: two gaps of the same mean.
    timer.observe(TokenEvent("r", (3, 4), step=4, time=101.0, finish_reason=FinishReason.LENGTH))
    for name, count, total in (
        ("cb_time_to_first_token_seconds", 1, 0.5),
        ("cb_inter_token_latency_seconds", 3, 0.5),
        ("cb_request_duration_seconds", 1, 1.0),
    ):
        assert registry.get_sample_value(f"{name}_count") == count
        assert registry.get_sample_value(f"{name}_sum") == pytest.approx(total)


def test_an_abort_is_no_duration(metrics: EngineMetrics, registry: CollectorRegistry) -> None:
    timer = RequestTimer(metrics, 100.0)
    timer.observe(TokenEvent("r", (), step=1, time=100.5, finish_reason=FinishReason.ABORT))
    assert registry.get_sample_value("cb_request_duration_seconds_count") == 0


def test_each_tenants_usage_is_copied_once_and_grows(
    metrics: EngineMetrics, registry: CollectorRegistry
) -> None:
    usage = TenantUsage(0.5, 12.0, 7, 40)
    for stats in (
        dataclasses.replace(STATS, tenants={"a": usage}),
        dataclasses.replace(STATS, tenants={"a": usage}),
        dataclasses.replace(STATS, tenants={"a": TenantUsage(1.5, 13.0, 9, 50), "": usage}),
    ):
        metrics.refresh(stats)
    for name, of_a, of_nobody in (
        ("device_seconds", 1.5, 0.5),
        ("kv_block_seconds", 13.0, 12.0),
        ("tokens_saved", 9, 7),
        ("generation_tokens", 50, 40),
    ):
        for tenant, value in (("a", of_a), ("", of_nobody)):
            sample = registry.get_sample_value(f"cb_tenant_{name}_total", {"tenant": tenant})
            assert sample == value
