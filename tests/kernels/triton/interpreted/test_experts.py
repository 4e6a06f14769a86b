"""A mixture of experts agrees with float64, whichever experts the tokens take."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from cb_kernels import mix_experts, reference, route
from cb_kernels.triton import experts, routing
from cb_kernels.triton.chips import CHIPS
from cb_kernels.triton.table import options
from torch import Tensor

from tests.kernels.triton.harness.closeness import TOLERANCES, assert_rounded

NUM_EXPERTS = 5
FEW = options("multiply_pairs", "few", CHIPS["sm_90"])


def _chosen(kind: str, num_tokens: int, top_k: int) -> Tensor:
    """Of each token `top_k` different experts."""
    if kind == "any":
        return torch.stack([torch.randperm(NUM_EXPERTS)[:top_k] for _ in range(num_tokens)])
    # The same for all: the others get none.
    return torch.randperm(NUM_EXPERTS)[:top_k].repeat(num_tokens, 1)


def _weights(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return (torch.randn(shape) * shape[-1] ** -0.5).to(dtype)


@pytest.mark.parametrize("kind", ["any", "alike"])
@pytest.mark.parametrize("num_tokens", [1, 7, 70, 1100])  # the last takes a program two turns
@pytest.mark.parametrize(("tile", "top_k"), [(16, 1), (16, 3), (64, 2)])
def test_tiles_have_each_pair_once_and_one_expert(
    tile: int, num_tokens: int, top_k: int, kind: str
) -> None:
    torch.manual_seed(num_tokens)
    chosen = _chosen(kind, num_tokens, top_k)
    tiles = routing.group_pairs(chosen, NUM_EXPERTS, tile)
    assert tiles.num_pairs == chosen.numel()
    pairs = chosen.flatten()
    for expert in range(NUM_EXPERTS):
        own = tiles.pairs[tiles.experts == expert].flatten()
        expected = (pairs == expert).nonzero()[:, 0].int()
        assert torch.equal(own[: len(expected)], expected)
        assert bool((own[len(expected) :] == len(pairs)).all())
        assert len(own) == -(-len(expected) // tile) * tile
    assert bool((tiles.experts >= -1).all())


def test_any_numbers_of_pairs_fit_into_their_tiles() -> None:
    """All divisions of a few pairs among experts, and some of many."""
    torch.manual_seed(0)
    parts = ((0, 1, 16, 40), (0, 15), (0, 33), (0, 2))
    counts = [torch.tensor(count) for count in itertools.product(*parts)]
    for count in counts:
        chosen = torch.repeat_interleave(torch.arange(4), count)[:, None]
        tiles = routing.group_pairs(chosen[torch.randperm(len(chosen))], 4, 16)
        found = [int((tiles.experts == expert).sum()) for expert in range(4)]
        assert found == (-(-count // 16)).tolist()
        assert sum(found) <= len(tiles.experts) == int((tiles.experts >= -1).sum())


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(
    ("num_tokens", "top_k", "widths", "kind"),
    [
        (1, 2, (48, 24), "any"),
        (9, 3, (70, 88), "any"),
        (40, 2, (144, 40), "alike"),  # two experts get all, in tiles that are not full
        (90, 1, (80, 72), "any"),  # enough for larger tiles
    ],
    ids=str,
)
def test_a_mixture_agrees_with_float64(
    num_tokens: int, top_k: int, widths: tuple[int, int], kind: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    hidden, inner = widths
    x = torch.randn(num_tokens, hidden).to(dtype)
    gate_up = _weights((NUM_EXPERTS, 2 * inner, hidden), dtype)
    down = _weights((NUM_EXPERTS, hidden, inner), dtype)
    weights, chosen = torch.rand(num_tokens, top_k), _chosen(kind, num_tokens, top_k)
    expected = reference.mix_experts(x, gate_up, down, weights, chosen, activation="silu")
    for invariant in (False, True) if dtype != torch.float32 else (False,):
        actual = mix_experts(
            *(x, gate_up, down, weights, chosen), activation="silu", invariant=invariant
        )
        assert actual.dtype == dtype
        assert actual.shape == x.shape
        # What is rounded on the way may fall to its other neighbour.
        tolerance = 6 * TOLERANCES[dtype]
        torch.testing.assert_close(actual.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    ("shape_class", "dtype"),
    [
        ("few", torch.bfloat16),
        ("few", torch.float16),
        ("many", torch.bfloat16),
        ("most", torch.bfloat16),
        ("fixed", torch.bfloat16),
        ("float32", torch.float32),
    ],
    ids=str,
)
def test_a_product_is_rounded_once(shape_class: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    config = options("multiply_pairs", shape_class, CHIPS["sm_90"])
    x, weight = torch.randn(33, 200).to(dtype), _weights((NUM_EXPERTS, 150, 200), dtype)
    chosen, factors = _chosen("any", 33, 2), torch.rand(33, 2)
    tiles = routing.group_pairs(chosen, NUM_EXPERTS, config["BLOCK_M"])
    actual = experts.multiply_pairs(x, weight, tiles, config, factors=factors)
    expected = torch.einsum("tk,tpnk->tpn", x.double(), weight.double()[chosen])
    assert_rounded(actual, (expected * factors[..., None]).flatten(0, 1), atol=2e-6)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_a_sum_is_rounded_once(dtype: torch.dtype) -> None:
    y = torch.randn(6 * 3, 1100).to(dtype)
    expected = y.double().view(6, 3, -1).sum(1)
    assert_rounded(experts.sum_pairs(y, 6), expected)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("shape", [(1, 5, 2), (9, 128, 8), (6, 8, 8), (3, 60, 1)], ids=str)
def test_a_route_is_that_of_float64(
    shape: tuple[int, int, int], dtype: torch.dtype, normalize: bool
) -> None:
    torch.manual_seed(1)
    num_tokens, num_experts, top_k = shape
    logits = (torch.randn(num_tokens, num_experts) * 2).to(dtype)
    logits[0, 1] = logits[0, 0]  # equals keep their order
    weights, chosen = route(logits, top_k, normalize=normalize)
    expected, order = reference.route(logits, top_k, normalize=normalize)
    assert torch.equal(chosen.long(), order)
    assert_rounded(weights, expected)


def test_a_token_that_is_no_number_takes_experts_that_exist_and_spoils_no_other() -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 48)
    x[1] = torch.nan
    router, gate_up = torch.randn(NUM_EXPERTS, 48), _weights((NUM_EXPERTS, 48, 48), torch.float32)
    down = _weights((NUM_EXPERTS, 48, 24), torch.float32)

    def mixed(rows: Tensor) -> Tensor:
        # One by one: the bits of torch's own product may depend on the number of rows (on Intel's).
        logits = torch.stack([router @ row for row in rows])
        weights, chosen = route(logits, 2, normalize=True)
        assert bool(((chosen >= 0) & (chosen < NUM_EXPERTS)).all())
        return mix_experts(rows, gate_up, down, weights, chosen, activation="gelu")

    y = mixed(x)
    assert bool(y[1].isnan().all())
    assert torch.equal(y[[0, 2]], mixed(x[[0, 2]]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_a_row_has_the_same_bits_in_any_company(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(60, 280).to(dtype)
    router = _weights((NUM_EXPERTS, 280), dtype)
    gate_up = _weights((NUM_EXPERTS, 80, 280), dtype)
    down = _weights((NUM_EXPERTS, 280, 40), dtype)

    def mixed(rows: Tensor, *, invariant: bool = True) -> Tensor:
        logits = torch.stack([router @ row for row in rows])
        weights, chosen = route(logits, 2, normalize=True)
        return mix_experts(
            *(rows, gate_up, down, weights, chosen), activation="gelu_tanh", invariant=invariant
        )

    together = mixed(x)
    assert torch.equal(torch.cat([mixed(row[None]) for row in x[57:]]), together[57:])
    assert torch.equal(mixed(x[37:]), together[37:])
    if dtype == torch.float16:  # float32 has one kind of tiles
        rows = (mixed(x, invariant=False)[37:], mixed(x[37:], invariant=False))
        assert not torch.equal(*rows)


def test_no_tokens_are_no_rows() -> None:
    x = torch.empty(0, 48)
    weights, chosen = route(torch.empty(0, NUM_EXPERTS), 2, normalize=True)
    gate_up, down = torch.ones(NUM_EXPERTS, 48, 48), torch.ones(NUM_EXPERTS, 48, 24)
    assert mix_experts(x, gate_up, down, weights, chosen, activation="silu").shape == (0, 48)


def test_a_planted_mistake_of_the_tiles_is_found() -> None:
    x, weight = torch.randn(9, 64), torch.randn(NUM_EXPERTS, 64, 64)
    tiles = routing.group_pairs(_chosen("any", 9, 2), NUM_EXPERTS, FEW["BLOCK_M"])
    strange = tiles.experts.clone()
    strange[0] = NUM_EXPERTS
    with pytest.raises(Exception, match="out of bounds"):
        experts.multiply_pairs(x, weight, replace(tiles, experts=strange), FEW)
    twice = tiles.pairs.clone()
    first, second = (tiles.experts >= 0).nonzero()[:2, 0]
    twice[second, 0] = twice[first, 0]
    with pytest.raises(Exception, match="stores where program"):
        experts.multiply_pairs(x, weight, replace(tiles, pairs=twice), FEW)


def test_what_does_not_fit_is_refused() -> None:
    x, weights, chosen = torch.ones(3, 48), torch.ones(3, 2), torch.zeros(3, 2, dtype=torch.int64)
    gate_up, down = torch.ones(NUM_EXPERTS, 48, 48), torch.ones(NUM_EXPERTS, 48, 24)

    mix: Callable[..., Tensor] = mix_experts

    def refused(match: str, **changes: object) -> None:
        named = {"x": x, "gate_up": gate_up, "down": down, "weights": weights, "chosen": chosen}
        with pytest.raises(ValueError, match=match):
            mix(**(named | {"activation": "silu"} | changes))

    refused("behind them", down=torch.ones(NUM_EXPERTS, 48, 23))
    refused("behind them", down=torch.ones(48, 24))
    refused("behind them", gate_up=gate_up.transpose(1, 2))
    refused("do not fit x", x=torch.ones(3, 47))
    refused("do not fit x", x=x.bfloat16())
    refused("do not fit x", weights=weights.bfloat16())
    refused("do not fit x", chosen=chosen[:2])
    refused("activation", activation="relu")
    with pytest.raises(ValueError, match="cannot be chosen"):
        route(torch.ones(3, 4), 5, normalize=False)
