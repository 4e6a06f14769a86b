"""A decoder in one call gives what its operations give one by one, wherever that call exists."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from cb_kernels import (
    PackedLinear,
    PagedStep,
    PairedCaches,
    PlainDecoder,
    RaggedBatch,
    TurnTables,
    pack_linear,
    paired_views,
)
from cb_kernels.cpu.library import kernels
from torch import Tensor

from cb_backend.config import EngineConfig
from cb_backend.runtime.attention import StepAttention
from cb_backend.runtime.kv_cache import KVCache
from cb_backend.runtime.models.decoder import Decoder
from cb_backend.runtime.models.loader import load_model
from tests.models import TinyModel
from tests.needs import needs_pairs
from tests.runtime.driving import prompt_of
from tests.runtime.logits import packed_logits

pytestmark = needs_pairs
PROMPTS = [prompt_of(length, seed=length) for length in (1, 16, 5, 40, 33, 150)]
_FITS = {"head_dim": 32, "intermediate_size": 96, "vocab_size": 208}

PLAIN = [
    TinyModel("llama", "llama", _FITS | {"tie_word_embeddings": True}),
    TinyModel("untied", "llama", _FITS | {"tie_word_embeddings": False}),
    TinyModel("torch-s-head", "llama", _FITS | {"vocab_size": 199}),
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
        _FITS
        | {"residual_multiplier": 0.7, "attention_multiplier": 0.2}
        | {"embedding_multiplier": 2.3, "logits_scaling": 3.0},
    ),
]
OTHERS = [
    TinyModel("half-8", "llama", {"head_dim": 16, "intermediate_size": 96}),
    TinyModel("odd-width", "llama", {"head_dim": 32, "intermediate_size": 80}),
    TinyModel("gelu", "llama", _FITS | {"hidden_act": "gelu"}),
    TinyModel("post-norms", "gemma2", _FITS | {"query_pre_attn_scalar": 20, "sliding_window": 9}),
    TinyModel("experts", "mixtral", _FITS | {"num_local_experts": 3, "num_experts_per_tok": 2}),
]


def load(tiny: TinyModel, folder: Path) -> Decoder:
    config = EngineConfig(model=str(tiny.save(folder)), dtype="bfloat16", device="cpu")
    model, _ = load_model(config, torch.device("cpu"))
    assert isinstance(model, Decoder)
    return model


@pytest.mark.parametrize("tiny", PLAIN, ids=str)
def test_in_one_call_as_one_by_one(tiny: TinyModel, tmp_path: Path) -> None:
    model = load(tiny, tmp_path)
    together = packed_logits(model, PROMPTS, block_size=16)
    plain, model._plain = model._plain, None
    assert plain is not None
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
    assert load(tiny, tmp_path)._plain is None


def test_without_a_call_that_works_plain_layers_run_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = packed_logits(load(PLAIN[0], tmp_path), PROMPTS, block_size=16)
    monkeypatch.setattr(kernels(), "has_decoder", False)
    model = load(PLAIN[0], tmp_path)
    assert model._plain is None
    for actual, logits in zip(packed_logits(model, PROMPTS, block_size=16), expected, strict=True):
        assert torch.equal(actual, logits)


def test_a_call_refuses_weights_that_the_library_would_misread(tmp_path: Path) -> None:
    plain = load(PLAIN[0], tmp_path)._plain
    assert plain is not None
    layers, ends = plain._weights, plain._ends
    for heads, kv_heads, dim in ((6, 2, 40), (6, 3, 32), (5, 1, 32)):
        shape = dataclasses.replace(plain._shape, heads=heads, kv_heads=kv_heads, dim=dim)
        with pytest.raises(ValueError, match="cannot be run in one call"):
            PlainDecoder(layers, ends, shape)
    with pytest.raises(ValueError, match="wider than a head"):
        PlainDecoder(layers, ends, dataclasses.replace(plain._shape, half=32))
    for heads, kv_heads in ((6, 4), (2, 6)):  # of weights that would fit
        shape = dataclasses.replace(plain._shape, heads=heads, kv_heads=kv_heads)
        qkv, output = ((heads + 2 * kv_heads) * 32, 48), (48, heads * 32)
        first = dataclasses.replace(layers[0], qkv=_packed(*qkv), output=_packed(*output))
        with pytest.raises(ValueError, match="cannot share"):
            PlainDecoder([first], ends, shape)
    vocab = 208
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("its embedding", {"embedding": torch.zeros(vocab, 48)}),
        ("its embedding", {"embedding": torch.zeros(48, vocab, dtype=torch.bfloat16).T}),
        ("its embedding", {"embedding": torch.zeros(vocab, 32, dtype=torch.bfloat16)}),
        ("its head", {"head": _packed(vocab + 16, 48)}),
        ("its head", {"head": _packed(vocab, 32)}),
        ("its last norm", {"norm": torch.zeros(48)}),
        ("its last norm", {"norm": torch.zeros(32, dtype=torch.bfloat16)}),
    ]
    for message, parts in wrong:
        with pytest.raises(ValueError, match=message):
            PlainDecoder(layers, dataclasses.replace(ends, **parts), plain._shape)


def _packed(width: int, depth: int) -> PackedLinear:
    packed = pack_linear(torch.zeros(width, depth, dtype=torch.bfloat16), None, gated=False)
    assert packed is not None
    return packed


def test_a_call_refuses_a_step_that_the_library_would_misread(tmp_path: Path) -> None:
    plain = load(PLAIN[0], tmp_path)._plain
    assert plain is not None
    bf16, blocks, size = torch.bfloat16, 3, 16

    def caches(count: int = 3, size: int = 16, dim: int = 32) -> PairedCaches:
        pools = torch.zeros(count, 2, 2, blocks, size * dim, dtype=bf16)
        return PairedCaches([paired_views(k, v, size) for k, v in pools])

    ids, slots, last = torch.arange(5), torch.arange(5), torch.tensor([4])
    cos, sin = torch.ones(5, 32, dtype=bf16), torch.zeros(5, 32, dtype=bf16)
    turns = TurnTables([(cos, sin)])
    table = torch.zeros(1, 1, dtype=torch.int32)
    batch = RaggedBatch(table, [0, 5], [5], size)
    right = PagedStep(caches(), batch, slots)
    vocab = plain._model.vocab
    assert plain.prepare(ids, turns, right, last).result().shape == (1, vocab)
    assert plain.prepare(ids, turns, right, torch.arange(5)).result().shape == (5, vocab)
    assert plain.prepare(ids, turns, right, last[:0]).result().shape == (0, vocab)
    other_batch = RaggedBatch(table, [0, 5], [5], 32)
    for wrong_table in (cos.float(), cos[:, :16], cos[0]):
        with pytest.raises(ValueError, match="cos and sin"):
            TurnTables([(cos, wrong_table)])
    short = TurnTables([(cos, sin[:4])])
    narrow = TurnTables([(cos[:, :16].contiguous(),) * 2])
    wrong: list[tuple[str, Tensor, Any, PagedStep, Tensor]] = [
        ("token ids must be", ids[1:], turns, right, last),
        ("token ids must be", ids.int(), turns, right, last),
        ("token ids must be", torch.arange(10)[::2], turns, right, last),
        ("slots must be", ids, turns, PagedStep(caches(), batch, slots[1:]), last),
        ("wanted tokens must be", ids, turns, right, torch.zeros(6, dtype=torch.int64)),
        ("wanted tokens must be", ids, turns, right, last.int()),
        ("name 1 turns, got 0", ids, TurnTables([]), right, last),
        ("cos and sin", ids, short, right, last),
        ("cos and sin", ids, narrow, right, last),
        ("3 layers, 2 caches", ids, turns, PagedStep(caches(2), batch, slots), last),
        ("the caches must be", ids, turns, PagedStep(right.caches, other_batch, slots), last),
        ("the caches must be", ids, turns, PagedStep(caches(dim=64), batch, slots), last),
    ]
    for message, ids_given, turns_given, step, wanted in wrong:
        with pytest.raises(ValueError, match=message):
            plain.prepare(ids_given, turns_given, step, wanted).result()
    bad_table = RaggedBatch(table + blocks, [0, 5], [5], size)
    not_there: list[tuple[Tensor, PagedStep, Tensor]] = [
        (ids, PagedStep(caches(), batch, slots + blocks * size), last),
        (ids, PagedStep(caches(), bad_table, slots), last),
        (ids - 1, right, last),
        (ids + vocab, right, last),
        (ids, right, last + 1),
        (ids, right, last - 5),
    ]
    for ids_given, step, wanted in not_there:
        with pytest.raises(IndexError, match="not there"):
            plain.prepare(ids_given, turns, step, wanted).result()


def test_caches_that_differ_among_layers_are_refused() -> None:
    def layers(count: int, dtype: torch.dtype = torch.bfloat16) -> list[tuple[Tensor, Tensor]]:
        pools = torch.zeros(count, 2, 2, 3, 16 * 32, dtype=dtype)
        return [paired_views(k, v, 16) for k, v in pools]

    k, v = layers(1)[0]
    for message, wrong in (
        ("must be bfloat16", layers(3, torch.float16)),
        ("not all caches", [*layers(2), (k[1:], v[1:])]),
        ("no paired cache", [(k.contiguous(), v)]),
    ):
        with pytest.raises(ValueError, match=message):
            PairedCaches(wrong)


def test_a_block_that_only_a_wider_layer_sees_is_looked_for(tmp_path: Path) -> None:
    """Layer 1 sees 10 keys, and the others all: a given up block is fine for it alone."""
    model = load(next(tiny for tiny in PLAIN if tiny.name == "qwen2-windows"), tmp_path)
    assert model._plain is not None
    pools = torch.zeros(3, 2, 2, 3, 16 * 32, dtype=torch.bfloat16)
    caches = PairedCaches([paired_views(k, v, 16) for k, v in pools])
    turns = TurnTables([(torch.ones(40, 32).bfloat16(), torch.zeros(40, 32).bfloat16())])
    for first_block, fits in ((0, True), (-1, False), (3, False)):
        table = torch.tensor([[first_block, 1, 2]], dtype=torch.int32)
        step = PagedStep(caches, RaggedBatch(table, [0, 1], [40], 16), torch.tensor([2 * 16 + 7]))
        if fits:
            model._plain.prepare(torch.tensor([5]), turns, step, torch.tensor([0])).result()
            continue
        with pytest.raises(IndexError, match="not there"):
            model._plain.prepare(torch.tensor([5]), turns, step, torch.tensor([0])).result()


@torch.inference_mode()
@pytest.mark.parametrize("tiny", PLAIN, ids=str)
def test_a_chunk_of_one_token_that_nobody_samples_leaves_its_key(
    tiny: TinyModel, tmp_path: Path
) -> None:
    model = load(tiny, tmp_path)
    prompt = PROMPTS[4]
    expected = packed_logits(model, [prompt], block_size=16)[0][-1]
    cache = KVCache(model.geometry, 3, 16, dtype=model.dtype, device=torch.device("cpu"))
    cuts = [0, 20, 21, 22, len(prompt)]
    logits = expected
    for start, stop in pairwise(cuts):
        positions = torch.arange(start, stop)
        batch = RaggedBatch(torch.arange(3).int()[None], [0, stop - start], [stop], 16)
        wanted = positions[-1:] - start if stop == len(prompt) else positions[:0]
        attention = StepAttention(cache, batch, positions)
        logits = model.forward(torch.tensor(prompt)[start:stop], positions, attention, wanted)
    if tiny.model_type == "mistral" or "window" in tiny.name:
        assert (logits[0] - expected).norm() / expected.norm() < 0.02  # sums begin elsewhere
    else:
        assert torch.equal(logits[0], expected)


@pytest.mark.parametrize("tiny", PLAIN, ids=str)
def test_the_wanted_tokens_are_those_of_all(tiny: TinyModel, tmp_path: Path) -> None:
    """In any order, and twice: the others leave the last layer early."""
    model = load(tiny, tmp_path)
    everything = torch.cat(packed_logits(model, PROMPTS, block_size=16))
    for wanted in ([244], [0, 1, 17, 22, 62, 95, 244], [200, 3, 3, 77], []):
        some = packed_logits(model, PROMPTS, block_size=16, wanted=torch.tensor(wanted).long())
        assert torch.equal(torch.cat(some), everything[wanted])
