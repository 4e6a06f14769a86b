"""What the model runner asks of a model, whichever implementation serves it. Engine thread."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from cb_kernels import PagedStep
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ModelGeometry:
    """What the KV cache and the limits depend on."""

    num_layers: int
    num_heads: int  # of the queries
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_context: int  # tokens
    window: int | None = None  # tokens that the widest layer reaches back; None: to the first


@dataclass(frozen=True, slots=True)
class HeadSteps:
    """What q and k go through before attention, in this order."""

    norms: tuple[Tensor, Tensor] | None  # weights [D] for each head of q and of k
    eps: float
    turns: tuple[Tensor, Tensor] | None  # cos and sin [T, 1, D]
    half: int  # of the rotary part


class HeadsAttention(Protocol):
    def attend_heads(
        self,
        layer: int,
        heads: Tensor,
        steps: HeadSteps,
        *,
        scale: float,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
    ) -> Tensor:
        """`Attention.attend` of heads [T, H_q + 2 H_kv, D] as they were projected."""
        ...


class Attention(Protocol):
    """The attention of one step. Each layer calls it exactly once, unless all of them run in one
    call on `paged`."""

    @property
    def fused(self) -> HeadsAttention | None:
        """What norms, turns and stores heads in one pass, where that exists."""
        ...

    @property
    def paged(self) -> PagedStep | None:
        """The step's rows where a `PlainDecoder` can run on them."""
        ...

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Keep this step's k and v [T, H_kv, D] and give q [T, H_q, D] its attention, like q."""
        ...


class ModelRun(Protocol):
    """A forward pass, for the thread that prepared it. Nothing that it was given may change until
    that has its result, but for the token ids until it begins."""

    def begin(self) -> None:
        """It is computed from now on, whatever the caller does."""
        ...

    def help(self) -> None:
        """Take part in it until its end is near."""
        ...

    def result(self) -> Tensor:
        """Take part in it to its end."""
        ...


class CausalModel(Protocol):
    """A decoder-only language model over one flat row of T tokens of several requests."""

    @property
    def geometry(self) -> ModelGeometry: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def is_capturable(self) -> bool:
        """Whether a forward pass waits for nothing and launches by its shapes alone."""
        ...

    @property
    def can_prepare(self) -> bool:
        """Whether it can `prepare` a step on an attention that is `paged`."""
        ...

    def is_batch_invariant(self, *, paged: bool) -> bool:
        """Whether a token's logits have the same bits whatever tokens come with it and however its
        sequence was cut, on a deterministic attention; `paged`: one that is `Attention.paged`."""
        ...

    def forward(
        self, token_ids: Tensor, positions: Tensor, attention: Attention, logit_rows: Tensor
    ) -> Tensor:
        """Logits [R, V] of the tokens at `logit_rows` [R], given token_ids and positions [T]."""
        ...

    def prepare(
        self, token_ids: Tensor, attention: Attention, logit_rows: Tensor, *, only_best: bool
    ) -> ModelRun:
        """A `forward` whose caller need not wait for its end. With `only_best` the result is ids
        [R]: of the largest logits, the first of equals; -1 where that is no finite number."""
        ...
