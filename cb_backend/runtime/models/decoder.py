"""The native decoder: one module for the Llama family, built from a `DecoderSpec`.

Works on one flat row of tokens [T, hidden] of several requests. Engine thread.
"""

from __future__ import annotations

import numpy as np
import torch
from cb_kernels import DecoderRun, PagedStep, PlainDecoder, TurnTables, uses_triton
from torch import Tensor, nn

from cb_backend.runtime.models.embedding import Embedding
from cb_backend.runtime.models.interface import Attention, HeadsAttention, HeadSteps, ModelGeometry
from cb_backend.runtime.models.linear import Linear
from cb_backend.runtime.models.mlp import SeparateExperts
from cb_backend.runtime.models.norms import QKNorm, RMSNorm, add_and_norm
from cb_backend.runtime.models.rope import Rope
from cb_backend.runtime.models.spec import DecoderSpec, LayerSpec

Turns = dict[str, tuple[Tensor, Tensor]]  # rope parameters' key -> cos and sin of the step


class Decoder(nn.Module):
    """A causal language model; see `interface.CausalModel`."""

    def __init__(
        self,
        spec: DecoderSpec,
        *,
        embedding: Embedding,
        layers: list[DecoderLayer],
        norm: RMSNorm,
        lm_head: Linear,
        ropes: dict[str, Rope],
        plain: PlainDecoder | None,  # all of it in one call, where that exists
        deterministic: bool,  # the linear layers were made so, where that takes making
    ) -> None:
        super().__init__()
        self.spec = spec
        self.embedding = embedding
        self.layers = nn.ModuleList(layers)
        self.norm = norm
        self.lm_head = lm_head
        self._ropes = ropes
        self._plain = plain
        self._turn_tables = TurnTables([])
        self._deterministic = deterministic

    @property
    def geometry(self) -> ModelGeometry:
        return ModelGeometry(
            num_layers=len(self.spec.layers),
            num_heads=self.spec.num_heads,
            num_kv_heads=self.spec.num_kv_heads,
            head_dim=self.spec.head_dim,
            vocab_size=self.spec.vocab_size,
            max_context=self.spec.max_context,
            window=self.spec.window,
        )

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def is_capturable(self) -> bool:
        # Of separate experts the host counts the rows.
        return not any(isinstance(module, SeparateExperts) for module in self.modules())

    @property
    def can_prepare(self) -> bool:
        # Logits that are scaled or capped are rounded again, and then others may be the largest.
        as_they_are = self.spec.logit_scale == 1.0 and self.spec.logit_soft_cap is None
        return self._plain is not None and self._plain.has_head and as_they_are

    def is_batch_invariant(self, *, paged: bool) -> bool:
        if uses_triton(self.norm.weight):
            return self._deterministic
        # The one call sums each row alone, and each query's keys from the first on; behind a window
        # the first depends on the chunk. All else on a CPU is torch's: its sums, and which numbers
        # of a tensor it computes by vectors, depend on the number of rows.
        windows = [layer.sliding_window for layer in self.spec.layers]
        return (
            self._plain is not None
            and self._plain.has_head
            and paged
            and not any(windows)
            and self.spec.logit_soft_cap is None
        )

    def forward(
        self, token_ids: Tensor, positions: Tensor, attention: Attention, logit_rows: Tensor
    ) -> Tensor:
        logits: Tensor  # [R, V]
        if self._plain is not None and (paged := attention.paged) is not None:
            run = self._plain.prepare(token_ids, self._tables(paged), paged, logit_rows)
            logits = run.result()
            if not self._plain.has_head:
                logits = self.lm_head(logits)
        else:
            logits = self.lm_head(self._normed(token_ids, positions, attention, logit_rows))
        if self.spec.logit_scale != 1.0:
            logits = logits * self.spec.logit_scale
        if (cap := self.spec.logit_soft_cap) is not None:
            logits = torch.tanh(logits / cap) * cap
        return logits

    def prepare(
        self,
        token_ids: Tensor,
        attention: Attention,
        logit_rows: Tensor,
        *,
        only_best: bool,
    ) -> DecoderRun:
        paged = attention.paged
        assert self._plain is not None
        assert paged is not None
        # By torch, an empty tensor would take ten times as long.
        ids = torch.from_numpy(np.empty(len(logit_rows), np.int64)) if only_best else None
        return self._plain.prepare(token_ids, self._tables(paged), paged, logit_rows, ids)

    def _tables(self, paged: PagedStep) -> TurnTables:
        longest = max(paged.batch.seq_lens)
        if self._turn_tables.num_positions < longest:
            pairs = [rope.turns_up_to(longest) for rope in self._ropes.values()]
            self._turn_tables = TurnTables(pairs)
        return self._turn_tables

    def _normed(
        self, token_ids: Tensor, positions: Tensor, attention: Attention, logit_rows: Tensor
    ) -> Tensor:
        """What `lm_head` multiplies [R, hidden], operation by operation."""
        x = self.embedding(token_ids)  # [T, hidden]
        if self.spec.embedding_scale != 1.0:
            # In the model's dtype, as the model was trained: 55.4256 is 55.5 in bfloat16.
            x = x * torch.tensor(self.spec.embedding_scale, dtype=x.dtype)
        turns = {kind: rope.turns(positions) for kind, rope in self._ropes.items()}
        if (fused := attention.fused) is not None:
            # Each sum with a residual waits for the norm that follows it: one pass makes both.
            y: Tensor | None = None
            for layer in self.layers:
                assert isinstance(layer, DecoderLayer)
                x, y = layer.run_fused(x, y, turns, attention, fused)
            assert y is not None
            rows = (x[logit_rows], y[logit_rows])
            return add_and_norm(*rows, self.norm, self.spec.residual_scale)[0]
        for layer in self.layers:
            x = layer(x, turns, attention)
        h: Tensor = self.norm(x[logit_rows])
        return h


class DecoderLayer(nn.Module):
    """Attention and MLP, each with a norm before, after, or both."""

    def __init__(
        self,
        spec: DecoderSpec,
        *,
        attention: SelfAttention,
        mlp: nn.Module,
        norms: dict[str, RMSNorm],  # of attention_in, attention_out, mlp_in, mlp_out
    ) -> None:
        super().__init__()
        self.attention = attention
        self.mlp = mlp
        self.attention_in = norms.get("attention_in")
        self.attention_out = norms.get("attention_out")
        self.mlp_in = norms.get("mlp_in")
        self.mlp_out = norms.get("mlp_out")
        self._residual_scale = spec.residual_scale

    def forward(self, x: Tensor, turns: Turns, attention: Attention) -> Tensor:
        scale = self._residual_scale
        h = x if self.attention_in is None else self.attention_in(x)
        if self.attention_out is None:
            x = self.attention(h, turns, attention, x, scale)
        else:
            h = self.attention(h, turns, attention)
            x = torch.add(x, self.attention_out(h), alpha=scale)
        h = x if self.mlp_in is None else self.mlp_in(x)
        if self.mlp_out is None:
            x = self.mlp(h, x, scale)
        else:
            x = torch.add(x, self.mlp_out(self.mlp(h)), alpha=scale)
        return x

    def run_fused(
        self,
        x: Tensor,
        y: Tensor | None,
        turns: Turns,
        attention: Attention,
        fused: HeadsAttention,
    ) -> tuple[Tensor, Tensor]:
        """`forward` of x + scale * y, without the last sum: x, and the y to add to it."""
        scale = self._residual_scale
        h, x = add_and_norm(x, y, self.attention_in, scale)
        y = self.attention.run_fused(h, turns, attention, fused)
        if self.attention_out is not None:
            y = self.attention_out(y)
        h, x = add_and_norm(x, y, self.mlp_in, scale)
        y = self.mlp(h)
        return x, y if self.mlp_out is None else self.mlp_out(y)


class SelfAttention(nn.Module):
    """Projects, norms, rotates, attends over the paged cache, projects back."""

    def __init__(
        self,
        spec: DecoderSpec,
        layer: LayerSpec,
        index: int,
        *,
        qkv: Linear,
        output: Linear,
        qk_norm: QKNorm | None,
        rope: Rope | None,
    ) -> None:
        super().__init__()
        self.qkv = qkv
        self.output = output
        self.qk_norm = qk_norm
        self._rope = rope
        self._spec = spec
        self.layer = layer
        self._index = index

    def forward(
        self,
        x: Tensor,
        turns: Turns,
        attention: Attention,
        onto: Tensor | None = None,
        scale: float = 1.0,
    ) -> Tensor:
        """x [T, hidden] to the same, times `scale` and added onto another if that is given."""
        spec = self._spec
        num_qk = spec.num_heads + spec.num_kv_heads
        heads = self.qkv(x).view(x.shape[0], -1, spec.head_dim)  # [T, H_q + 2 H_kv, D]
        qk, v = heads[:, :num_qk], heads[:, num_qk:]
        if self.qk_norm is not None:
            qk = self.qk_norm(qk)
        if self._rope is not None and self.layer.rope is not None:
            qk = self._rope.apply(qk, turns[self.layer.rope])
        attended = attention.attend(
            self._index,
            qk[:, : spec.num_heads],
            qk[:, spec.num_heads :],
            v,
            scale=spec.attention_scale,
            sliding_window=self.layer.sliding_window,
            soft_cap=spec.attention_soft_cap,
        )
        y: Tensor = self.output(attended.reshape(x.shape[0], -1), onto, scale)
        return y

    def run_fused(
        self, x: Tensor, turns: Turns, attention: Attention, fused: HeadsAttention
    ) -> Tensor:
        """`forward`, with what lies between the projections and attention in one pass."""
        spec, norms = self._spec, self.qk_norm
        if norms is not None and not norms.is_by_head:
            return self.forward(x, turns, attention)
        rope, kind = self._rope, self.layer.rope
        attended = fused.attend_heads(
            self._index,
            self.qkv(x).view(x.shape[0], -1, spec.head_dim),
            HeadSteps(
                norms=None if norms is None else (norms.q.weight, norms.k.weight),
                eps=0.0 if norms is None else norms.q.eps,
                turns=None if rope is None or kind is None else turns[kind],
                half=0 if rope is None else rope.half,
            ),
            scale=spec.attention_scale,
            sliding_window=self.layer.sliding_window,
            soft_cap=spec.attention_soft_cap,
        )
        y: Tensor = self.output(attended.reshape(x.shape[0], -1))
        return y
