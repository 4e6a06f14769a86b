"""The public operations of a mixture of experts. On a GPU nothing waits for it: how many rows an
expert gets is known only there.

A pair is a token and one of its experts; token t's pairs are t * top_k and those that follow.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from cb_kernels.shapes import shape_text
from cb_kernels.triton.launch import uses_triton

Activation = Literal["silu", "gelu", "gelu_tanh"]


def route(logits: Tensor, top_k: int, *, normalize: bool) -> tuple[Tensor, Tensor]:
    """The weights, float32, and ids [T, top_k] of the experts that logits [T, E] prefer, best
    first: their shares in a softmax; `normalize`: made to sum to 1.

    Raises ValueError where there are fewer than `top_k` experts.
    """
    if logits.dim() != 2 or not 0 < top_k <= logits.shape[1]:
        raise ValueError(f"{top_k} experts cannot be chosen by logits {shape_text(logits)}")
    if uses_triton(logits):
        from cb_kernels.triton import routing

        return routing.route(logits, top_k, normalize=normalize)
    weights, chosen = torch.topk(torch.softmax(logits, -1, dtype=torch.float32), top_k, dim=-1)
    return weights / weights.sum(-1, keepdim=True) if normalize else weights, chosen


def mix_experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    chosen: Tensor,
    *,
    activation: Activation,
    invariant: bool = False,
) -> Tensor:
    """The sum [T, H] of what a token's experts make of it, each times its weight; for GPUs.

    gate_up [E, 2 I, H], gate over up, and down [E, H, I] are the experts' own; weights, float32,
    and chosen [T, top_k] are those of `route`. `invariant`: a row has the same bits whatever rows
    come with it. Raises ValueError on shapes, dtypes or devices that do not fit.
    """
    hidden, inner = down.shape[1:] if down.dim() == 3 else (0, 0)
    if (
        gate_up.shape != (down.shape[0], 2 * inner, hidden)
        or not gate_up.is_contiguous()
        or not down.is_contiguous()
    ):
        raise ValueError(
            f"experts {shape_text(gate_up)} do not fit experts {shape_text(down)} behind them"
        )
    if x.dim() != 2 or x.shape[1] != hidden or not x.dtype == gate_up.dtype == down.dtype:
        raise ValueError(f"experts {shape_text(gate_up)} do not fit x {shape_text(x)}")
    if (
        chosen.dim() != 2
        or chosen.shape[0] != x.shape[0]
        or weights.shape != chosen.shape
        or weights.dtype != torch.float32
    ):
        raise ValueError(
            f"weights {shape_text(weights)} and ids {shape_text(chosen)} do not fit"
            f" x {shape_text(x)}"
        )
    if activation not in get_args(Activation):
        raise ValueError(f"activation must be {get_args(Activation)}, got {activation!r}")
    if not uses_triton(x):
        raise ValueError(f"x on {x.device} is not for these kernels")
    from cb_kernels.triton import experts

    return experts.mix_experts(
        *(x.contiguous(), gate_up, down, weights.contiguous(), chosen.contiguous()),
        activation=activation,
        invariant=invariant,
    )
