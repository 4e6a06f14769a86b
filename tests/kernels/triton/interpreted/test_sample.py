"""The sampler keeps exactly what a sort would keep, and draws it as often as it should."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import triton
import triton.language as tl
from cb_kernels import LogitEdits, SamplingParameters, edit_logits, reference, sample
from cb_kernels.triton.launch import launch
from cb_kernels.triton.sample import _best, _gumbel, _kept
from torch import Tensor


@triton.jit
def _show_kept(
    logits_ptr,
    kept_ptr,
    temperature,
    top_k,
    top_p,
    vocab,
    PIVOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    best, _, _ = _best(logits_ptr, vocab, BLOCK)
    t, m = _kept(logits_ptr, best, temperature, vocab, top_k, top_p, PIVOTS, BLOCK)
    tl.store(kept_ptr, t)
    tl.store(kept_ptr + 1, m)


@triton.jit
def _show_gumbel(bits_ptr, out_ptr, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    tl.store(out_ptr + lane, _gumbel(tl.load(bits_ptr + lane)))


def _kept_tokens(
    logits: Tensor, *, temperature: float, top_k: int, top_p: float, block: int = 4096
) -> Tensor:
    """What the kernel's search keeps [V], before min_p."""
    found = torch.zeros(2, dtype=torch.int32)
    parameters = (
        torch.tensor(temperature).item(),
        torch.tensor([top_k]),
        torch.tensor([top_p]),
    )
    launch(
        _show_kept_of_pointers, (1,), logits, found, *parameters, len(logits), PIVOTS=4, BLOCK=block
    )
    t, m = found.tolist()
    keys = ((logits.float().max() - logits.float()) / temperature).view(torch.int32)
    tied = keys == t
    return (keys < t) | (tied & (tied.cumsum(0) <= m))


@triton.jit
def _show_kept_of_pointers(
    logits_ptr,
    kept_ptr,
    temperature,
    top_k_ptr,
    top_p_ptr,
    vocab,
    PIVOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    _show_kept(
        logits_ptr,
        kept_ptr,
        temperature,
        tl.load(top_k_ptr),
        tl.load(top_p_ptr),
        vocab,
        PIVOTS,
        BLOCK,
    )


def _parameters(num_rows: int, **values: float) -> SamplingParameters:
    def row(name: str, default: float, dtype: torch.dtype) -> Tensor:
        return torch.full((num_rows,), values.get(name, default), dtype=dtype)

    return SamplingParameters(
        temperature=row("temperature", 1.0, torch.float32),
        top_k=row("top_k", 0, torch.int64),
        top_p=row("top_p", 1.0, torch.float32),
        min_p=row("min_p", 0.0, torch.float32),
        seeds=row("seed", 7, torch.int64),
        positions=torch.arange(num_rows),
    )


FILTERS = [
    (0, 1.0),
    (1, 1.0),
    (5, 1.0),
    (40, 1.0),
    (0, 0.0),
    (0, 0.3),
    (0, 0.95),
    (7, 0.6),
    (40, 0.999),
]


@pytest.mark.parametrize(("top_k", "top_p"), FILTERS)
@pytest.mark.parametrize("temperature", [0.3, 1.0, 5.0])
def test_the_kept_tokens_are_those_of_a_sort(top_k: int, top_p: float, temperature: float) -> None:
    torch.manual_seed(0)
    filters = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    for vocab in (50, 333):
        logits = torch.randn(vocab) * 3
        logits[::7] = -torch.inf
        kept = _kept_tokens(logits, **filters, block=256)
        expected = reference.kept_tokens(logits, **filters, min_p=0.0)
        assert torch.equal(kept, expected), (kept ^ expected).nonzero()


@pytest.mark.parametrize(("top_k", "top_p"), [(3, 1.0), (8, 1.0), (0, 0.47), (11, 0.8), (5, 0.01)])
def test_of_equal_logits_the_first_stay(top_k: int, top_p: float) -> None:
    torch.manual_seed(0)
    filters = {"temperature": 1.0, "top_k": top_k, "top_p": top_p}
    for levels in (1, 2, 4):
        logits = torch.randint(0, levels, (48,)).float()
        expected = reference.kept_tokens(logits, **filters, min_p=0.0)
        assert torch.equal(_kept_tokens(logits, **filters, block=16), expected)


def test_greedy_rows_take_the_first_of_the_largest() -> None:
    logits = torch.randn(4, 5000).bfloat16()
    logits[0, [17, 4999]] = 9
    logits[1, [4999]] = 9
    logits[2] = 0
    tokens, sound = sample(logits, _parameters(4, temperature=0.0))
    assert tokens.tolist() == [17, 4999, 0, int(logits[3].float().argmax())]
    assert bool(sound.all())


def test_a_row_that_cannot_be_drawn_from_is_said_so() -> None:
    logits = torch.randn(6, 33)
    logits[0, 32] = torch.nan
    logits[1, 3] = torch.inf
    logits[2] = -torch.inf
    logits[3] = torch.nan
    logits[4, 1:] = -torch.inf
    tokens, sound = sample(logits, _parameters(6))
    assert sound.tolist() == [False, False, False, False, True, True]
    assert tokens[4] == 0


def _chi_square(tokens: Tensor, expected: Tensor) -> float:
    """How far counts are from what they should be; tokens without weight must not occur."""
    counts = torch.bincount(tokens, minlength=len(expected)).double()
    assert bool((counts[expected == 0] == 0).all())
    likely = expected > 0
    means = expected[likely] * len(tokens)
    return float(((counts[likely] - means).square() / means).sum())


@pytest.mark.parametrize(
    ("filters", "num_rows"),
    [({"temperature": 0.8}, 300), ({"top_k": 4}, 60), ({"top_p": 0.7, "min_p": 0.3}, 60)],
    ids=str,
)
def test_tokens_come_as_often_as_their_weight_says(
    filters: dict[str, float], num_rows: int
) -> None:
    logits = torch.tensor([2.0, -1.0, 1.5, 0.0, 1.5, -3.0, 0.7, -torch.inf])
    tokens, _ = sample(logits.expand(num_rows, 8).contiguous(), _parameters(num_rows, **filters))
    defaults = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    kept = reference.kept_tokens(logits, **(defaults | filters))
    scaled = (logits.double() / filters.get("temperature", 1.0)).masked_fill(~kept, -torch.inf)
    # 99.9% of right samplers stay below 24.3 with 7 degrees of freedom; the seeds are fixed.
    assert _chi_square(tokens, torch.softmax(scaled, 0)) < 24.3


def test_a_token_depends_on_seed_position_and_row_alone() -> None:
    torch.manual_seed(0)
    logits = torch.randn(5, 5000)
    parameters = _parameters(5, top_p=0.99)
    parameters.seeds[3] = -(2**63)
    parameters.positions[4] = 2**33 + 4
    tokens, _ = sample(logits, parameters)
    order = torch.tensor([4, 2, 0])
    turned = SamplingParameters(
        *(getattr(parameters, field.name)[order] for field in dataclasses.fields(parameters))
    )
    assert torch.equal(sample(logits[order], turned)[0], tokens[order])
    again = _parameters(1, top_p=0.99)
    assert sample(logits[:1], again)[0] == tokens[0]


def test_every_part_of_seed_and_position_matters() -> None:
    logits = torch.zeros(1, 4096)
    drawn = set()
    for seed, position in ((1, 1), (1 + 2**40, 1), (1, 1 + 2**40), (2, 1), (1, 2)):
        parameters = _parameters(1, seed=seed)
        parameters.positions.fill_(position)
        drawn.add(int(sample(logits, parameters)[0]))
    assert len(drawn) == 5


def test_the_noise_is_gumbels_to_its_far_end() -> None:
    bits = torch.tensor(
        [0, 1, 1000, 2**22, 2**31 - 1, -(2**31), -(2**20), -1000, -1, 5, 6, 7, 8, 9, 10, 11]
    )
    u = ((bits % 2**32).double() + 0.5) / 2**32
    out = torch.full((16,), 777.0)
    launch(_show_gumbel, (1,), bits.int(), out, BLOCK=16)
    expected = -torch.log(-torch.log1p(-u))
    inner = u < 1 - 1e-3
    torch.testing.assert_close(out.double()[inner], expected[inner], atol=3e-6, rtol=3e-6)
    assert bool((out[~inner] < -1.9).all())
    assert bool(out.isfinite().all())


def test_edits_agree_with_float64() -> None:
    torch.manual_seed(0)
    num_rows, vocab = 3, 2100
    words = -(-vocab // 32)
    ids = torch.tensor([[5, 2099, -1], [-1, -1, -1], [0, 1, 64]], dtype=torch.int32)
    counts = torch.randint(-3, 4, (num_rows, vocab), dtype=torch.int32).clamp(min=0)
    edits = LogitEdits(
        allowed=torch.randint(-(2**31), 2**31, (num_rows, words)).int(),
        bias=(ids, torch.randn(num_rows, 3) * 10),
        counts=counts,
        prompt=torch.randint(-(2**31), 2**31, (num_rows, words)).int(),
        repetition=torch.tensor([1.0, 1.3, 0.8]),
        presence=torch.tensor([0.0, -0.5, 1.5]),
        frequency=torch.tensor([0.0, 0.25, -2.0]),
    )
    logits = torch.randn(num_rows, vocab).bfloat16()
    for edit in (
        edits,
        LogitEdits(allowed=edits.allowed),
        LogitEdits(bias=edits.bias),
        LogitEdits(),
    ):
        edited = edit_logits(logits, edit)
        expected = reference.edit_logits(logits, edit)
        torch.testing.assert_close(edited.double(), expected, atol=1e-5, rtol=1e-6)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="top_k"):
        sample(torch.zeros(2, 8), dataclasses.replace(_parameters(2), top_k=torch.zeros(3).long()))
    with pytest.raises(ValueError, match="an edit"):
        edit_logits(torch.zeros(2, 33), LogitEdits(allowed=torch.zeros(2, 1, dtype=torch.int32)))
