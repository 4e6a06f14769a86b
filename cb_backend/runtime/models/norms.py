"""The norms of a decoder, alone and with the residual's sum before them. Engine thread."""

from __future__ import annotations

import torch
from cb_kernels import add_rms_norm, rms_norm
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension.

    A weight in float32 with x in less is a norm that the model was trained to compute in float32.
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight = weight
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class QKNorm(nn.Module):
    """Norms q and k, lying together as [T, H_q + H_kv, D]: each head, or all heads at once."""

    def __init__(self, q: RMSNorm, k: RMSNorm, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self._head_dim = head_dim
        self.q = q
        self.k = k
        self._num_heads = num_heads

    @property
    def is_by_head(self) -> bool:
        return self.q.weight.shape == self.k.weight.shape == (self._head_dim,)

    def forward(self, qk: Tensor) -> Tensor:
        q, k = qk[:, : self._num_heads], qk[:, self._num_heads :]
        if not self.is_by_head:
            q_flat, k_flat = self.q(q.flatten(1)), self.k(k.flatten(1))
            return torch.cat((q_flat, k_flat), -1).view(qk.shape)
        return torch.cat((self.q(q), self.k(k)), 1)


def add_and_norm(
    x: Tensor, y: Tensor | None, norm: RMSNorm | None, scale: float
) -> tuple[Tensor, Tensor]:
    """The norm of x + scale * y, and that sum."""
    if y is None:
        return (x if norm is None else norm(x)), x
    if norm is None:
        x = torch.add(x, y, alpha=scale)
        return x, x
    return add_rms_norm(y, x, norm.weight, norm.eps, scale)
