"""The gated MLP and the mixture of experts made of it. Engine thread."""

from __future__ import annotations

import torch
from cb_kernels import Activation, gelu_and_mul, mix_experts, route
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


class Router(nn.Module):
    """Chooses each token's experts: the few it scores highest."""

    def __init__(self, scores: Linear, *, top_k: int, normalize: bool) -> None:
        super().__init__()
        self.scores = scores
        self._top_k = top_k
        self._normalize = normalize

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights, float32, and ids [T, top_k] for x [T, hidden]."""
        return route(self.scores(x), self._top_k, normalize=self._normalize)


class SeparateExperts(nn.Module):
    """An MLP for each expert, whose weights are packed like any; for CPUs.

    Tokens are grouped by expert, so each chosen expert multiplies once per step.
    """

    def __init__(self, experts: list[GatedMLP]) -> None:
        super().__init__()
        self.experts = nn.ModuleList(experts)

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """x [T, hidden] to the same, by the experts and weights [T, top_k] of each."""
        order = chosen.flatten().argsort(stable=True)
        tokens = order // chosen.shape[1]
        weights = weights.flatten()[order, None].to(x.dtype)
        out = torch.zeros_like(x)
        start = 0
        # The host must know how many rows each expert gets. A device would be waited for here.
        counts = torch.bincount(chosen.flatten(), minlength=len(self.experts)).tolist()
        for expert, count in zip(self.experts, counts, strict=True):
            if count:
                rows = tokens[start : start + count]
                out.index_add_(0, rows, expert(x[rows]) * weights[start : start + count])
                start += count
        return out


class StackedExperts(nn.Module):
    """All experts' weights in two tensors, for the kernels in Triton: nobody counts rows.

    `invariant`: a row has the same bits whatever rows come with it.
    """

    def __init__(
        self, gate_up: Tensor, down: Tensor, activation: Activation, *, invariant: bool
    ) -> None:
        super().__init__()
        self.gate_up = gate_up  # [E, 2 * intermediate, hidden]
        self.down = down  # [E, hidden, intermediate]
        self._activation: Activation = activation
        self._invariant = invariant

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """As of `SeparateExperts`."""
        return mix_experts(
            *(x, self.gate_up, self.down, weights, chosen),
            activation=self._activation,
            invariant=self._invariant,
        )


class MixtureOfExperts(nn.Module):
    """Each token goes through the few MLPs its router scores highest."""

    def __init__(self, router: Router, experts: SeparateExperts | StackedExperts) -> None:
        super().__init__()
        self.router = router
        self.experts = experts

    def forward(self, x: Tensor, onto: Tensor | None = None, scale: float = 1.0) -> Tensor:
        """x [T, hidden] to the same, times `scale` and added onto another if that is given."""
        out: Tensor = self.experts(x, *self.router(x))
        return out if onto is None else torch.add(onto, out, alpha=scale)
