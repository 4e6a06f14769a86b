"""A whole model gives the same logits with the kernels in Triton as with torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from cb_kernels import RaggedBatch
from cb_kernels.triton import launch
from torch import Tensor, nn

from cb_backend.config import EngineConfig
from cb_backend.runtime.attention import StepAttention
from cb_backend.runtime.kv_cache import KVCache
from cb_backend.runtime.models.interface import CausalModel
from cb_backend.runtime.models.loader import load_model
from cb_backend.runtime.models.mlp import SeparateExperts, StackedExperts
from tests.models import TinyModel

BLOCK_SIZE = 16
_TWO_LAYERS = {"num_hidden_layers": 2}
PROMPTS = ([3, 5, 7, 11, 13] * 8, [2, 4, 6], [17] * 21)

# (sequence, computed before, computed after) of each row of a step.
STEPS = (
    ((0, 0, 30), (1, 0, 2)),
    ((0, 30, 39), (1, 2, 3), (2, 0, 20)),
    ((0, 39, 40), (2, 20, 21)),
)


def _logits(model: CausalModel) -> list[Tensor]:
    """Of each step [T, V]: chunks, a chunk beside decoding, decoding."""
    width = 3
    cpu = torch.device("cpu")
    cache = KVCache(model.geometry, width * 3, BLOCK_SIZE, dtype=model.dtype, device=cpu)
    cache.clear(range(width * 3))
    table = torch.tensor([[8, 1, 5], [2, 6, 0], [7, 3, 4]])
    return [_step(model, cache, table, rows) for rows in STEPS]


@torch.inference_mode()
def _step(
    model: CausalModel, cache: KVCache, table: Tensor, rows: Sequence[tuple[int, int, int]]
) -> Tensor:
    counts = [after - before for _, before, after in rows]
    positions = torch.cat([torch.arange(before, after) for _, before, after in rows])
    sequences = torch.repeat_interleave(torch.tensor([s for s, _, _ in rows]), torch.tensor(counts))
    blocks = table[sequences, positions // BLOCK_SIZE]
    batch = RaggedBatch(
        block_table=table[[s for s, _, _ in rows]],
        query_start_loc=[sum(counts[:i]) for i in range(len(rows) + 1)],
        seq_lens=[after for _, _, after in rows],
        block_size=BLOCK_SIZE,
    )
    attention = StepAttention(cache, batch, blocks * BLOCK_SIZE + positions % BLOCK_SIZE)
    tokens = torch.tensor([token for s, a, b in rows for token in PROMPTS[s][a:b]])
    return model.forward(tokens, positions, attention, torch.arange(len(tokens)))


# What may stand between two products: biases, norms of heads, norms after, none before, scales.
MODELS = (
    TinyModel("llama", "llama", _TWO_LAYERS | {"attention_bias": True}),
    TinyModel("qwen3", "qwen3", _TWO_LAYERS | {"head_dim": 16}),
    TinyModel(
        "gemma2",
        "gemma2",
        _TWO_LAYERS | {"head_dim": 12, "query_pre_attn_scalar": 20, "sliding_window": 9},
    ),
    TinyModel("olmo2", "olmo2", _TWO_LAYERS),
    TinyModel("smollm3", "smollm3", _TWO_LAYERS | {"no_rope_layers": [1, 0]}),
    TinyModel("granite", "granite", _TWO_LAYERS | {"residual_multiplier": 0.7}),
)
_EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
MIXTURES = (
    TinyModel("mixtral", "mixtral", _TWO_LAYERS | {"num_local_experts": 5, "hidden_act": "gelu"}),
    TinyModel(
        "qwen3-moe", "qwen3_moe", _TWO_LAYERS | _EXPERTS | {"mlp_only_layers": [1], "head_dim": 16}
    ),
)


def _load(folder: Path) -> CausalModel:
    config = EngineConfig(model=str(folder), dtype="float32", device="cpu", implementation="native")
    model, implementation = load_model(config, torch.device("cpu"))
    assert implementation == "native"
    assert model.geometry.num_layers == 2
    return model


def _has(model: CausalModel, kind: type[nn.Module]) -> bool:
    assert isinstance(model, nn.Module)
    return any(isinstance(module, kind) for module in model.modules())


@pytest.mark.parametrize("tiny", MODELS + MIXTURES, ids=str)
def test_logits_are_those_of_torch(
    tiny: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = _load(tiny.save(tmp_path))
    interpreted = _logits(model)
    monkeypatch.setattr(launch, "INTERPRETED", False)
    if tiny in MIXTURES:
        assert _has(model, StackedExperts)
        model = _load(tmp_path)
        assert _has(model, SeparateExperts)
    for ours, expected in zip(interpreted, _logits(model), strict=True):
        torch.testing.assert_close(ours, expected, atol=2e-5, rtol=2e-5)
        assert not torch.equal(ours, expected)  # they are not the same code
