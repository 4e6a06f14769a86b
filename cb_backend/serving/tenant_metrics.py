"""What each tenant has used, as Prometheus counters. Asyncio loop.

The engine counts a limited number of tenants by name, so the label has as many values.
"""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter

from cb_backend.engine.stats import TenantUsage


class TenantMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str) -> Counter:
            return Counter(f"cb_tenant_{name}", text, ("tenant",), registry=registry)

        self._device_seconds = counter("device_seconds", "Its shares of the steps, by tokens")
        self._block_seconds = counter("kv_block_seconds", "KV blocks held, times seconds of steps")
        self._tokens_saved = counter("tokens_saved", "Prompt tokens that were computed before")
        self._tokens = counter("generation_tokens", "Output tokens of its requests that ended")
        self._seen: Mapping[str, TenantUsage] = {}

    def refresh(self, tenants: Mapping[str, TenantUsage]) -> None:
        """`tenants` are totals since the start."""
        for tenant, now in tenants.items():
            before = self._seen.get(tenant, TenantUsage())
            for counter, amount in (
                (self._device_seconds, now.device_seconds - before.device_seconds),
                (self._block_seconds, now.kv_block_seconds - before.kv_block_seconds),
                (self._tokens_saved, now.tokens_saved - before.tokens_saved),
                (self._tokens, now.generated_tokens - before.generated_tokens),
            ):
                counter.labels(tenant).inc(amount)
        self._seen = tenants
