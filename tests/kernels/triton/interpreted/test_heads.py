"""Norm, rotation and store of heads agree with float64, and touch no slot that is not theirs."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from cb_kernels import reference, rope, store_heads, store_kv
from torch import Tensor

from tests.kernels.triton.harness.closeness import TOLERANCES, assert_rounded

SENTINEL = 7.5  # exact in every dtype
EPS = 1e-6
FLOAT8 = torch.float8_e4m3fn
NUM_BLOCKS, BLOCK_SIZE = 5, 4
SLOTS = torch.tensor([19, -1, 0, 7, -1, 8, 3])


@dataclass(frozen=True)
class Heads:
    num_q: int
    num_kv: int
    head_dim: int
    half: int  # 0: no rotation
    norms: bool

    def __str__(self) -> str:
        return f"{self.num_q}q-{self.num_kv}kv-{self.head_dim}-turns{self.half}-norms{self.norms}"


SHAPES = [
    Heads(4, 2, 64, 32, norms=False),
    Heads(6, 2, 80, 40, norms=True),
    Heads(3, 1, 128, 64, norms=True),
    Heads(5, 1, 96, 36, norms=True),  # partly rotary
    Heads(2, 2, 112, 0, norms=True),
    Heads(2, 1, 256, 128, norms=False),
]


def _cache(shape: Heads, dtype: torch.dtype, *, heads_outside: bool = False) -> Tensor:
    size = (NUM_BLOCKS, BLOCK_SIZE, shape.num_kv, shape.head_dim)
    cache = torch.full(size, SENTINEL)
    if heads_outside:
        cache = cache.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)
    return cache.to(dtype)


def _turns(num_tokens: int, shape: Heads, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    angles = torch.rand(num_tokens, 1, shape.half) * 6
    rest = torch.zeros(num_tokens, 1, shape.head_dim - 2 * shape.half)
    cos = torch.cat((angles.cos(), angles.cos(), rest + 1), -1)
    sin = torch.cat((-angles.sin(), angles.sin(), rest), -1)
    return cos.to(dtype), sin.to(dtype)


def _stored(cache: Tensor, slots: Tensor) -> Tensor:
    """What lies in the slots [n, H_kv, D], and the proof that the others were left alone."""
    flat = cache.float().reshape(-1, *cache.shape[2:])
    others = torch.ones(len(flat), dtype=torch.bool)
    others[slots] = False
    assert bool((flat[others] == SENTINEL).all())
    return flat[slots]


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_heads_are_normed_turned_and_stored(shape: Heads, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    num_tokens = len(SLOTS)
    heads = torch.randn(num_tokens, shape.num_q + 2 * shape.num_kv, shape.head_dim).to(dtype)
    norms = torch.randn(2, shape.head_dim).to(dtype).unbind() if shape.norms else None
    turns = _turns(num_tokens, shape, dtype) if shape.half else None
    k_cache, v_cache = _cache(shape, dtype), _cache(shape, dtype, heads_outside=True)
    q = store_heads(
        *(heads, k_cache, v_cache, SLOTS), turns=turns, half=shape.half, norms=norms, eps=EPS
    )
    expected_q, k, v = heads.split((shape.num_q, shape.num_kv, shape.num_kv), 1)
    if norms is not None:
        expected_q = reference.rms_norm(expected_q, norms[0], EPS)
        k = reference.rms_norm(k, norms[1], EPS)
    if turns is not None:
        expected_q = reference.rope(expected_q, *turns, shape.half)
        k = reference.rope(k, *turns, shape.half)
    assert q.dtype == dtype
    assert_rounded(q, expected_q.double(), atol=5e-6)
    kept = SLOTS >= 0
    stored_k = _stored(k_cache, SLOTS[kept]).to(dtype)
    assert_rounded(stored_k, k[kept].double(), atol=5e-6)
    assert torch.equal(_stored(v_cache, SLOTS[kept]), v[kept].float())


def test_a_float8_cache_holds_numbers_over_their_heads_scale() -> None:
    shape = Heads(4, 2, 80, 40, norms=True)
    heads = torch.randn(len(SLOTS), 8, 80).bfloat16() * 20
    norms = (torch.ones(80).bfloat16(), torch.ones(80).bfloat16())
    turns = _turns(len(SLOTS), shape, torch.bfloat16)
    scales = (torch.tensor([0.02, 0.5]), torch.tensor([0.01, 3.0]))  # the small ones saturate
    caches = _cache(shape, FLOAT8), _cache(shape, FLOAT8)
    store_heads(*(heads, *caches, SLOTS), turns=turns, half=40, norms=norms, eps=EPS, scales=scales)
    kept = SLOTS >= 0
    k = reference.rope(reference.rms_norm(heads[:, 4:6], norms[1], EPS), *turns, 40)[kept]
    stored_k = _stored(caches[0], SLOTS[kept])
    expected = (k / scales[0][:, None]).clamp(-448, 448)
    torch.testing.assert_close(stored_k.double(), expected, atol=2**-10, rtol=2**-4 * 1.01)
    expected_v = (heads[:, 6:].float() / scales[1][:, None]).clamp(-448, 448).to(FLOAT8).float()
    assert bool((expected_v.abs() == 448).any())
    assert torch.equal(_stored(caches[1], SLOTS[kept]), expected_v[kept])


@pytest.mark.parametrize("dtype", [*TOLERANCES, FLOAT8], ids=str)
@pytest.mark.parametrize("shape", SHAPES[1:3], ids=str)
def test_store_kv_is_exact(shape: Heads, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    is_float8 = dtype == FLOAT8
    heads = torch.randn(len(SLOTS), 9, shape.head_dim).to(torch.bfloat16 if is_float8 else dtype)
    k, v = heads[:, 1 : 1 + shape.num_kv], heads[:, 5 : 5 + shape.num_kv]
    scales = (torch.rand(shape.num_kv) + 0.1, torch.rand(shape.num_kv) + 0.1) if is_float8 else None
    caches = _cache(shape, dtype), _cache(shape, dtype)
    expected = reference.store_kv(k, v, *caches, SLOTS, scales)
    store_kv(k, v, *caches, SLOTS, scales)
    assert torch.equal(caches[0].float(), expected[0].float())
    assert torch.equal(caches[1].float(), expected[1].float())


def test_two_tokens_in_one_slot_are_a_race_that_is_found() -> None:
    cache = torch.zeros(1, 4, 1, 16)
    k = torch.randn(9, 1, 16)
    slots = torch.tensor([0, 1, 2, 3, -1, -1, -1, -1, 2])
    with pytest.raises(Exception, match="program 1 stores where program 0 stored"):
        store_kv(k, k, cache, cache.clone(), slots)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_rope_turns_heads_where_they_lie(dtype: torch.dtype) -> None:
    shape = Heads(5, 0, 96, 36, norms=False)
    heads = torch.randn(7, 9, 96).to(dtype)
    x, turns = heads[:, 2:7], _turns(7, shape, dtype)
    assert_rounded(rope(x, *turns, 36), reference.rope(x, *turns, 36), atol=5e-6)


def test_what_does_not_fit_is_refused() -> None:
    cache, k = torch.zeros(2, 4, 2, 16), torch.zeros(3, 2, 16)
    slots = torch.tensor([0, 1, 2])
    scale = torch.ones(2)
    with pytest.raises(ValueError, match="too few for a cache"):
        store_heads(torch.zeros(3, 4, 16), cache, cache, slots)
    with pytest.raises(ValueError, match="scales are for a cache in float8"):
        store_kv(k, k, cache, cache, slots, (scale, scale))
    with pytest.raises(ValueError, match="a scale"):
        store_kv(k, k, cache.to(FLOAT8), cache.to(FLOAT8), slots, (scale, scale[:1]))
    with pytest.raises(ValueError, match="do not fit a cache"):
        store_kv(k, k, cache.to(FLOAT8), cache.to(FLOAT8), slots)
