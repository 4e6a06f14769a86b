"""A mixture of experts: right with tiles of each size, the same for one row as among many, and how
fast beside the time to read the experts that are hit."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import count

import torch
from cb_kernels import mix_experts, reference, route
from torch import Tensor

from gpu_check.kernels import TINY, Correct, Model, Timed
from gpu_check.timing import Run

_EXPERTS, _TOP_K = 4, 2
# (hidden, intermediate, experts, a token's): Qwen3 30B-A3B's, and those of a dry run.
_REAL, _DRY = (2048, 768, 128, 8), (64, 32, 4, 2)


def correct(model: Model, device: torch.device) -> Iterator[Correct]:
    torch.manual_seed(0)
    hidden, inner = model.hidden, model.intermediate // 8
    cases = [(5, torch.bfloat16, 2**-8), (70, torch.bfloat16, 2**-8), (5, torch.float16, 2**-11)]
    cases += [(70, torch.float32, 2e-5)]
    if model is not TINY:
        cases += [(600, torch.bfloat16, 2**-8)]  # for the largest tiles
    for num_tokens, dtype, unit in cases:
        x = torch.randn(num_tokens, hidden, device=device).to(dtype)
        gate_up = _weights(_EXPERTS, 2 * inner, hidden, dtype, device)
        down = _weights(_EXPERTS, hidden, inner, dtype, device)
        logits = torch.randn(num_tokens, _EXPERTS, device=device).to(dtype)
        name = f"{str(dtype).removeprefix('torch.')} T={num_tokens}"
        # What is rounded on the way may fall to its other neighbour.
        yield Correct(
            *("experts", name),
            partial(_mixed, x, gate_up, down, logits),
            partial(_reference, x, gate_up, down, logits),
            unit * 4,
            least=0.5,
        )
        if num_tokens != 70:
            continue
        yield Correct(
            *("experts", f"{name}, one row"),
            partial(_mixed, x[3:4], gate_up, down, logits[3:4], invariant=True),
            partial(_row_among_many, x, gate_up, down, logits),
            tolerance=0.0,
        )
    logits = (torch.randn(30, 128, device=device) * 2).bfloat16()
    for part, name in enumerate(("weights", "ids")):
        yield Correct(
            *("route", name),
            partial(_part_of_route, logits, part),
            partial(_part_of_expected_route, logits, part),
            tolerance=1e-5 * (1 - part),
            least=1e-3,
        )


def _weights(
    num_experts: int, width: int, depth: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    weights = torch.randn(num_experts, width, depth, dtype=dtype, device=device)
    return weights.mul_(depth**-0.5)


def _mixed(
    x: Tensor, gate_up: Tensor, down: Tensor, logits: Tensor, *, invariant: bool = False
) -> Tensor:
    chosen = route(logits, _TOP_K, normalize=True)
    return mix_experts(x, gate_up, down, *chosen, activation="silu", invariant=invariant)


def _reference(x: Tensor, gate_up: Tensor, down: Tensor, logits: Tensor) -> Tensor:
    chosen = reference.route(logits, _TOP_K, normalize=True)
    return reference.mix_experts(x, gate_up, down, *chosen, activation="silu")


def _row_among_many(x: Tensor, gate_up: Tensor, down: Tensor, logits: Tensor) -> Tensor:
    return _mixed(x, gate_up, down, logits, invariant=True)[3:4].double()


def _part_of_route(logits: Tensor, part: int) -> Tensor:
    return route(logits, 8, normalize=False)[part]


def _part_of_expected_route(logits: Tensor, part: int) -> Tensor:
    return reference.route(logits, 8, normalize=False)[part].double()


def timed(model: Model, device: torch.device, *, scale: int = 1) -> Iterator[Timed]:
    """Bfloat16, with the choice of experts. The floor has the weights of those that are hit."""
    hidden, inner, num_experts, top_k = _REAL if scale == 1 else _DRY
    gate_up = _weights(num_experts, 2 * inner, hidden, torch.bfloat16, device)
    down = _weights(num_experts, hidden, inner, torch.bfloat16, device)
    turns = count()

    def make(chosen: Tensor) -> Run:
        num_tokens = len(chosen)
        # Other experts each time, as many: the first ones' weights may be in the cache.
        others = (chosen + next(turns) * top_k) % num_experts
        logits = torch.zeros(num_tokens, num_experts, device=device)
        scores = 1 + torch.rand(chosen.shape, device=device)
        logits.scatter_(1, others.to(device), scores)
        x = torch.randn(num_tokens, hidden, device=device).bfloat16()

        def run() -> Tensor:
            chosen = route(logits, top_k, normalize=True)
            return mix_experts(x, gate_up, down, *chosen, activation="silu")

        return run

    for num_tokens in (1, 16, 64, 256, 4096):
        tokens = max(1, num_tokens // scale)
        chosen = torch.rand(tokens, num_experts).topk(top_k).indices
        num_hit = len(chosen.unique())
        yield Timed(
            *("experts", f"T={tokens}", partial(make, chosen)),
            num_bytes=2 * (3 * num_hit * hidden * inner + 2 * tokens * hidden),
            num_flops=6 * tokens * top_k * hidden * inner,
        )
