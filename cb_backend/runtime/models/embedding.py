"""Token embeddings: a weight of its own, or the rows of a packed lm_head that is tied to it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from cb_kernels import PackedLinear
from torch import Tensor, nn


class Embedding(nn.Module):
    """token ids [T] to [T, hidden]."""

    def __init__(self, weight: Tensor | PackedLinear) -> None:
        """A packed weight is read where it lies, in 1 µs a token more, so that no second copy of
        it is kept: of a small model it is a fifth of the memory."""
        super().__init__()
        self.weight = weight

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype

    def forward(self, token_ids: Tensor) -> Tensor:
        if isinstance(self.weight, PackedLinear):
            return self.weight.rows(token_ids)
        return F.embedding(token_ids, self.weight)
