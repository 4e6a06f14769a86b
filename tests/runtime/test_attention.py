"""A step's attention writes before it reads, and plans each window once for all layers."""

from __future__ import annotations

import pytest
import torch
from cb_kernels import RaggedBatch

from cb_backend.runtime.attention import StepAttention
from cb_backend.runtime.kv_cache import KVCache
from cb_backend.runtime.models.interface import ModelGeometry

GEOMETRY = ModelGeometry(
    num_layers=4, num_heads=4, num_kv_heads=2, head_dim=8, vocab_size=9, max_context=64
)


def _step() -> tuple[KVCache, RaggedBatch, StepAttention]:
    cache = KVCache(GEOMETRY, 5, 4, dtype=torch.float32, device=torch.device("cpu"))
    cache.clear(range(5))
    batch = RaggedBatch(
        block_table=torch.tensor([[3, 1], [2, 0]]),
        query_start_loc=[0, 1, 6],
        seq_lens=[1, 5],
        block_size=4,
    )
    slots = torch.tensor([12, 8, 9, 10, 11, 0])
    return cache, batch, StepAttention(cache, batch, slots)


def test_a_first_token_sees_itself_alone() -> None:
    _, _, attention = _step()
    torch.manual_seed(0)
    q, (k, v) = torch.randn(6, 4, 8), torch.randn(2, 6, 2, 8)
    for layer in range(4):
        out = attention.attend(layer, q, k, v, scale=0.3)
        torch.testing.assert_close(out[:2], v[:2].repeat_interleave(2, 1))


def test_layers_keep_their_own_keys_and_values() -> None:
    cache, _, attention = _step()
    q = torch.zeros(6, 4, 8)
    for layer in range(4):
        k = torch.full((6, 2, 8), float(layer + 1))
        attention.attend(layer, q, k, -k, scale=1.0)
    for layer, (k_cache, v_cache) in enumerate(cache.layers):
        assert bool((k_cache[3, 0] == layer + 1).all())
        assert bool((v_cache[0, 0] == -(layer + 1)).all())
        assert not bool(k_cache[4].any())


def test_plans_are_made_once_for_each_window(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, attention = _step()
    windows: list[int | None] = []
    build = RaggedBatch._build

    def counting(batch: RaggedBatch, window: int | None, layout: object) -> object:
        windows.append(window)
        return build(batch, window, layout)  # type: ignore[arg-type]

    monkeypatch.setattr(RaggedBatch, "_build", counting)
    q, k = torch.zeros(6, 4, 8), torch.zeros(6, 2, 8)
    for layer, window in enumerate((3, None, 3, None)):
        attention.attend(layer, q, k, k, scale=1.0, sliding_window=window)
    assert windows == [3, None]
