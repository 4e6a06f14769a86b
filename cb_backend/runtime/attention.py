"""The attention of one step over the KV cache: the only caller of the paged operations.

Engine thread. One `StepAttention` lives for one forward pass; what it derives from the rows
(gather indices, masks) is derived once and shared by all layers.
"""

from __future__ import annotations

from cb_kernels import (
    PagedStep,
    RaggedBatch,
    paged_attention,
    store_heads,
    store_kv,
    uses_triton,
)
from torch import Tensor

from cb_backend.runtime.kv_cache import KVCache
from cb_backend.runtime.models.interface import HeadsAttention, HeadSteps


class StepAttention:
    """Implements `models.interface.Attention` for the rows of a step."""

    def __init__(self, cache: KVCache, batch: RaggedBatch, slot_mapping: Tensor) -> None:
        self._cache = cache
        self._batch = batch
        self._slot_mapping = slot_mapping  # [T] int64

    @property
    def paged(self) -> PagedStep | None:
        if self._cache.paired is None:
            return None
        return PagedStep(self._cache.paired, self._batch, self._slot_mapping)

    @property
    def fused(self) -> HeadsAttention | None:
        return self if uses_triton(self._slot_mapping) else None

    def attend_heads(
        self,
        layer: int,
        heads: Tensor,
        steps: HeadSteps,
        *,
        scale: float,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
    ) -> Tensor:
        k_cache, v_cache = self._cache.layers[layer]
        q = store_heads(
            *(heads, k_cache, v_cache, self._slot_mapping),
            turns=steps.turns,
            half=steps.half,
            norms=steps.norms,
            eps=steps.eps,
            scales=self._cache.scales,
        )
        return paged_attention(
            *(q, k_cache, v_cache, self._batch),
            scale=scale,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
            scales=self._cache.scales,
        )

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        k_cache, v_cache = self._cache.layers[layer]
        store_kv(k, v, k_cache, v_cache, self._slot_mapping, self._cache.scales)
        return paged_attention(
            q,
            k_cache,
            v_cache,
            self._batch,
            scale=scale,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
            sinks=sinks,
            scales=self._cache.scales,
        )
