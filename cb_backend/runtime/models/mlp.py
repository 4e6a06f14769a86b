"""The gated MLP and the mixture of experts made of it. Engine thread."""

from __future__ import annotations

import torch
from cb_kernels import gelu_and_mul
from torch import Tensor, nn

from cb_backend.runtime.models.linear import Linear


class GatedMLP(nn.Module):
    """down(activation(gate(x)) * up(x)); gate and up are one product.

    `gate_up` may do the activation and the multiplication itself: then it is gated, and
    `activation` is None.
    """

    def __init__(self, gate_up: Linear, down: Linear, activation: str | None) -> None:
        super().__init__()
        self.gate_up = gate_up
        self.down = down
        self.activation = activation

    def forward(self, x: Tensor, onto: Tensor | None = None, scale: float = 1.0) -> Tensor:
        """x [T, hidden] to the same, times `scale` and added onto another if that is given."""
        h = self.gate_up(x)
        if self.activation is not None:
            h = gelu_and_mul(h, tanh=self.activation == "gelu_pytorch_tanh")  # [T, intermediate]
        y: Tensor = self.down(h, onto, scale)
        return y


class MixtureOfExperts(nn.Module):
    """Each token goes through the few MLPs its router scores highest.

    Tokens are grouped by expert, so each chosen expert multiplies once per step.
    """

    def __init__(
        self, router: Linear, experts: list[GatedMLP], *, top_k: int, normalize: bool
    ) -> None:
        super().__init__()
        self.router = router
        self.experts = nn.ModuleList(experts)
        self._top_k = top_k
        self._normalize = normalize

    def forward(self, x: Tensor, onto: Tensor | None = None, scale: float = 1.0) -> Tensor:
        """x [T, hidden] to the same, times `scale` and added onto another if that is given."""
        scores = torch.softmax(self.router(x), -1, dtype=torch.float32)
        weights, chosen = torch.topk(scores, self._top_k, dim=-1)  # [T, top_k]
        if self._normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        order = chosen.flatten().argsort(stable=True)
        tokens = order // self._top_k
        weights = weights.flatten()[order, None].to(x.dtype)
        out = torch.zeros_like(x)
        start = 0
        # The one wait for the device: the host must know how many rows each expert gets.
        counts = torch.bincount(chosen.flatten(), minlength=len(self.experts)).tolist()
        for expert, count in zip(self.experts, counts, strict=True):
            if count:
                rows = tokens[start : start + count]
                out.index_add_(0, rows, expert(x[rows]) * weights[start : start + count])
                start += count
        return out if onto is None else torch.add(onto, out, alpha=scale)
