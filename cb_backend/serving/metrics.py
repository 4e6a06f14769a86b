"""The engine's Prometheus metrics, written in the process that has the engine. Asyncio loop.

BentoML runs prometheus_client in its multiprocess mode: every gauge says how processes combine.
A runner that was restarted counts, so `mostrecent`, never a sum with the dead one's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from cb_backend.core.request import FinishReason
from cb_backend.core.step_io import TokenEvent
from cb_backend.engine.stats import EngineStats
from cb_backend.serving.tenant_metrics import TenantMetrics

_TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_ITL_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5)
_E2E_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)

_REFRESH_S = 0.25


class HasStats(Protocol):
    def stats(self) -> EngineStats: ...


class EngineMetrics:
    """One per process: names are unique in a registry."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        def gauge(name: str, text: str) -> Gauge:
            return Gauge(name, text, multiprocess_mode="mostrecent", registry=registry)

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(name, text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, buckets=buckets, registry=registry)

        # The same number under our name and under the one that existing dashboards ask for.
        self._running = [
            gauge("cb_requests_running", "Requests that share the steps now"),
            gauge("vllm:num_requests_running", "Alias of cb_requests_running"),
        ]
        self._waiting = [
            gauge("cb_requests_waiting", "Requests in the queue"),
            gauge("vllm:num_requests_waiting", "Alias of cb_requests_waiting"),
        ]
        self._kv_usage = [
            gauge("cb_kv_cache_usage_ratio", "Share of the KV blocks in use, 0 to 1"),
            gauge("vllm:kv_cache_usage_perc", "Alias of cb_kv_cache_usage_ratio"),
        ]
        self.ttft = histogram(
            "cb_time_to_first_token_seconds", "From submit to the first token", _TTFT_BUCKETS
        )
        self.itl = histogram(
            "cb_inter_token_latency_seconds", "Between two tokens of a request", _ITL_BUCKETS
        )
        self.e2e = histogram(
            "cb_request_duration_seconds", "From submit to the end, unless aborted", _E2E_BUCKETS
        )
        self._finished = counter("cb_requests_finished", "By how they ended", ("reason",))
        for reason in FinishReason:
            self._finished.labels(reason.value)  # shown as 0 until it happens
        self._totals: list[tuple[Counter, Callable[[EngineStats], int]]] = [
            (counter("cb_prompt_tokens", "Prompt tokens of all requests taken in"), _prompt_tokens),
            (counter("cb_computed_tokens", "Tokens that went through the model"), _computed_tokens),
            (counter("cb_generation_tokens", "Output tokens"), _generated_tokens),
            (counter("cb_prefix_cached_tokens", "Prompt tokens found in cache"), _cached_tokens),
            (counter("cb_preemptions", "Requests that lost their blocks"), _preemptions),
            (counter("cb_steps", "Steps of the engine"), _steps),
            (counter("cb_failed_steps", "Steps that raised"), _failed_steps),
        ]
        self._tenants = TenantMetrics(registry)
        self._seen = EngineStats()
        self._is_first = True

    async def follow(self, engine: HasStats) -> None:
        """Copy the engine's own counts, until cancelled."""
        while True:
            self.refresh(engine.stats())
            await asyncio.sleep(_REFRESH_S)

    def refresh(self, stats: EngineStats) -> None:
        # The first time also without news: a gauge may still show what a dead runner left there.
        if stats == self._seen and not self._is_first:
            return
        self._is_first = False
        for gauges, value in (
            (self._running, stats.num_running),
            (self._waiting, stats.num_waiting),
            (self._kv_usage, stats.kv_usage),
        ):
            for gauge in gauges:
                gauge.set(value)
        for counter, value_of in self._totals:
            counter.inc(value_of(stats) - value_of(self._seen))
        for reason, count in stats.finished.items():
            self._finished.labels(reason.value).inc(count - self._seen.finished.get(reason, 0))
        self._tenants.refresh(stats.tenants)
        self._seen = stats


class RequestTimer:
    """Observes the latencies of one request from its events' own times."""

    __slots__ = ("_last", "_metrics", "_submitted")

    def __init__(self, metrics: EngineMetrics, now: float) -> None:
        self._metrics = metrics
        self._submitted = now  # seconds, the engine's clock, as the events' times
        self._last: float | None = None

    def observe(self, event: TokenEvent) -> None:
        num_tokens = len(event.token_ids)
        if num_tokens and self._last is None:
            self._metrics.ttft.observe(event.time - self._submitted)
            num_tokens -= 1
        if num_tokens and self._last is not None:
            gap = (event.time - self._last) / num_tokens
            for _ in range(num_tokens):
                self._metrics.itl.observe(gap)
        if event.token_ids:
            self._last = event.time
        if event.finish_reason not in (None, FinishReason.ABORT):
            self._metrics.e2e.observe(event.time - self._submitted)


def _prompt_tokens(stats: EngineStats) -> int:
    return stats.prompt_tokens


def _computed_tokens(stats: EngineStats) -> int:
    return stats.computed_tokens


def _generated_tokens(stats: EngineStats) -> int:
    return stats.generated_tokens


def _cached_tokens(stats: EngineStats) -> int:
    return stats.cached_tokens


def _preemptions(stats: EngineStats) -> int:
    return stats.preemptions


def _steps(stats: EngineStats) -> int:
    return stats.steps


def _failed_steps(stats: EngineStats) -> int:
    return stats.failed_steps
