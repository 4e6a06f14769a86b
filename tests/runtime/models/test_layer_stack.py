"""All layers in one call give what they give one by one, for whichever models that call exists."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from cb_kernels import (
    LayerStack,
    PackedLinear,
    PagedStep,
    RaggedBatch,
    StackShape,
    can_pair,
    pack_linear,
    paired_views,
)
from torch import Tensor

from cb_backend.config import EngineConfig
from cb_backend.runtime.models.decoder import Decoder
from cb_backend.runtime.models.loader import load_model
from tests.models import TinyModel
from tests.runtime.driving import prompt_of
from tests.runtime.logits import packed_logits

PROMPTS = [prompt_of(length, seed=length) for length in (1, 16, 5, 40, 33, 150)]
_FITS = {"head_dim": 32, "intermediate_size": 96}

PLAIN = [
    TinyModel("llama", "llama", _FITS),
    TinyModel("biases", "llama", _FITS | {"attention_bias": True, "mlp_bias": True}),
    TinyModel("mistral-window", "mistral", _FITS | {"sliding_window": 7}),
    TinyModel(
        "qwen2-windows",
        "qwen2",
        _FITS | {"use_sliding_window": True, "sliding_window": 10, "max_window_layers": 1},
    ),
    TinyModel("qwen3-head-norms", "qwen3", _FITS),
    TinyModel("smollm3-some-unturned", "smollm3", _FITS | {"no_rope_layers": [1, 0, 1]}),
    TinyModel(
        "granite-scales",
        "granite",
        _FITS | {"residual_multiplier": 0.7, "attention_multiplier": 0.2},
    ),
]
OTHERS = [
    TinyModel("half-8", "llama", {"head_dim": 16, "intermediate_size": 96}),
    TinyModel("odd-width", "llama", {"head_dim": 32, "intermediate_size": 80}),
    TinyModel("gelu", "llama", _FITS | {"hidden_act": "gelu"}),
    TinyModel("post-norms", "gemma2", _FITS | {"query_pre_attn_scalar": 20, "sliding_window": 9}),
    TinyModel("experts", "mixtral", _FITS | {"num_local_experts": 3, "num_experts_per_tok": 2}),
]


@pytest.fixture(autouse=True)
def _needs_the_kernels() -> None:
    if not can_pair(torch.bfloat16, block_size=16, head_dim=32, group=3):
        pytest.skip("no products of bfloat16 pairs on this machine")


def load(tiny: TinyModel, folder: Path) -> Decoder:
    config = EngineConfig(model=str(tiny.save(folder)), dtype="bfloat16", device="cpu")
    model, _ = load_model(config, torch.device("cpu"))
    assert isinstance(model, Decoder)
    return model


@pytest.mark.parametrize("tiny", PLAIN, ids=str)
def test_in_one_call_as_one_by_one(tiny: TinyModel, tmp_path: Path) -> None:
    model = load(tiny, tmp_path)
    together = packed_logits(model, PROMPTS, block_size=16)
    stack, model._stack = model._stack, None
    assert stack is not None
    one_by_one = packed_logits(model, PROMPTS, block_size=16)
    exact = tiny.model_type != "qwen3"  # torch norms its heads, and rounds in another order
    for actual, expected in zip(together, one_by_one, strict=True):
        if exact:
            assert torch.equal(actual, expected)
        else:
            assert (actual - expected).norm() / expected.norm() < 0.02


@pytest.mark.parametrize("tiny", PLAIN, ids=str)
def test_a_sequence_has_the_same_bits_alone_and_among_others(
    tiny: TinyModel, tmp_path: Path
) -> None:
    model = load(tiny, tmp_path)
    together = packed_logits(model, PROMPTS, block_size=16)
    for prompt, logits in zip(PROMPTS, together, strict=True):
        assert torch.equal(packed_logits(model, [prompt], block_size=16)[0], logits)


@pytest.mark.parametrize("tiny", PLAIN, ids=str)
def test_it_follows_float32_closely(tiny: TinyModel, tmp_path: Path) -> None:
    reference = tiny.build()
    logits = packed_logits(load(tiny, tmp_path), PROMPTS, block_size=16)
    for prompt, actual in zip(PROMPTS, logits, strict=True):
        with torch.inference_mode():
            expected = reference(input_ids=torch.tensor([prompt]), use_cache=False).logits[0]
        assert (actual.float() - expected).norm() / expected.norm() < 0.06


@pytest.mark.parametrize("tiny", OTHERS, ids=str)
def test_other_layers_run_one_by_one(tiny: TinyModel, tmp_path: Path) -> None:
    assert load(tiny, tmp_path)._stack is None


def test_a_stack_refuses_what_the_library_would_misread(tmp_path: Path) -> None:
    stack = load(PLAIN[0], tmp_path)._stack
    assert stack is not None
    facts = {"half": 16, "eps": 1e-5, "attention_scale": 1.0, "residual_scale": 1.0}
    for heads, kv_heads, dim in ((6, 2, 40), (6, 3, 32), (5, 1, 32)):
        shape = StackShape(heads=heads, kv_heads=kv_heads, dim=dim, soft_cap=None, **facts)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="cannot be run in one call"):
            LayerStack(stack._weights, shape)
    for heads, kv_heads in ((6, 4), (2, 6)):  # of weights that would fit
        shape = StackShape(heads=heads, kv_heads=kv_heads, dim=32, soft_cap=None, **facts)  # type: ignore[arg-type]
        qkv, output = ((heads + 2 * kv_heads) * 32, 48), (48, heads * 32)
        first = dataclasses.replace(stack._weights[0], qkv=_packed(*qkv), output=_packed(*output))
        with pytest.raises(ValueError, match="cannot share"):
            LayerStack([first], shape)


def _packed(width: int, depth: int) -> PackedLinear:
    packed = pack_linear(torch.zeros(width, depth, dtype=torch.bfloat16), None, gated=False)
    assert packed is not None
    return packed


def test_a_stack_refuses_a_step_that_the_library_would_misread(tmp_path: Path) -> None:
    stack = load(PLAIN[0], tmp_path)._stack
    assert stack is not None
    bf16, blocks, size = torch.bfloat16, 3, 16

    def caches(count: int = 3, dtype: torch.dtype = bf16) -> list[tuple[Tensor, Tensor]]:
        pools = torch.zeros(count, 2, 2, blocks, size * 32, dtype=dtype)
        return [paired_views(k, v, size) for k, v in pools]

    x, slots = torch.zeros(5, 48, dtype=bf16), torch.arange(5)
    turns = [(torch.ones(5, 1, 32, dtype=bf16), torch.zeros(5, 1, 32, dtype=bf16))]
    batch = RaggedBatch(torch.zeros(1, 1, dtype=torch.int32), [0, 5], [5], size)
    assert stack(x, turns, PagedStep(caches(), batch, slots)).shape == (5, 48)
    other_batch = RaggedBatch(torch.zeros(1, 1, dtype=torch.int32), [0, 5], [5], 32)
    wide = [(turns[0][0].expand(5, 2, 32), turns[0][1])]
    copied = [(k.contiguous(), v) for k, v in caches()]
    mixed = [*caches(2), tuple(one[1:] for one in caches(1)[0])]
    wrong: list[tuple[str, Tensor, Any, PagedStep]] = [
        ("x must be", x[1:], turns, PagedStep(caches(), batch, slots)),
        ("x must be", x.float(), turns, PagedStep(caches(), batch, slots)),
        ("need as many slots", x, turns, PagedStep(caches(), batch, slots[1:])),
        ("name 1 turns, got 0", x, [], PagedStep(caches(), batch, slots)),
        ("cos and sin", x, wide, PagedStep(caches(), batch, slots)),
        ("cos and sin", x, [(x.float(), x)], PagedStep(caches(), batch, slots)),
        ("3 layers, 2 caches", x, turns, PagedStep(caches(2), batch, slots)),
        ("must be bfloat16", x, turns, PagedStep(caches(3, torch.float16), batch, slots)),
        ("not all caches", x, turns, PagedStep(mixed, batch, slots)),  # type: ignore[list-item]
        ("no paired cache", x, turns, PagedStep(copied, batch, slots)),
        ("the caches must be", x, turns, PagedStep(caches(), other_batch, slots)),
    ]
    for message, x_given, turns_given, step in wrong:
        with pytest.raises(ValueError, match=message):
            stack(x_given, turns_given, step)
    with pytest.raises(IndexError, match="not there"):
        stack(x, turns, PagedStep(caches(), batch, slots + blocks * size))
