"""Proves at load time that a model keeps all state of a sequence in our attention.

An architecture that computes part of its attention itself, or carries a convolution or recurrent
state, would serve wrong text without any error; so every fallback model is tried. Engine thread.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from cb_kernels import RaggedBatch, paged_attention, store_kv
from torch import Tensor

from cb_backend.errors import ModelError
from cb_backend.runtime.models.interface import CausalModel

_BLOCK_SIZE = 16
_NUM_TOKENS = 12  # of the tried sequence; one block
_CUT = 7  # where it is cut in two


@dataclass
class _TrialAttention:
    """A one-block cache per layer that grows as layers call, and the calls it saw."""

    caches: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    windows: list[int | None] = field(default_factory=list)  # of each call
    num_heads: set[int] = field(default_factory=set)
    calls: list[int] = field(default_factory=list)
    num_computed: int = 0
    paged: None = None
    fused: None = None

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
        if k.shape != v.shape:
            raise ModelError(
                f"keys are {list(k.shape[1:])} and values {list(v.shape[1:])}; only models where"
                " both have one shape can be served",
                field="model",
            )
        self.calls.append(layer)
        self.windows.append(sliding_window)
        self.num_heads.add(q.shape[1])
        if layer not in self.caches:
            shape = (1, _BLOCK_SIZE, *k.shape[1:])
            self.caches[layer] = (k.new_zeros(shape), k.new_zeros(shape))
        k_cache, v_cache = self.caches[layer]
        num_tokens = q.shape[0]
        slots = torch.arange(num_tokens, device=q.device) + self.num_computed
        store_kv(k, v, k_cache, v_cache, slots)
        batch = RaggedBatch(
            block_table=torch.zeros(1, 1, dtype=torch.int32),
            query_start_loc=[0, num_tokens],
            seq_lens=[self.num_computed + num_tokens],
            block_size=_BLOCK_SIZE,
            device=q.device,
        )
        return paged_attention(
            q,
            k_cache,
            v_cache,
            batch,
            scale=scale,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
            sinks=sinks,
        )


@torch.inference_mode()
def observed_geometry(
    model: CausalModel, num_layers: int, device: torch.device
) -> tuple[int, int, int, int | None]:
    """Heads, KV heads, head dimension and widest window that the layers' attention calls show.

    Raises ModelError unless each layer calls exactly once, all with one shape.
    """
    trial = _TrialAttention()
    _logits(model, _tokens(device), trial)
    if sorted(trial.calls) != list(range(num_layers)):
        raise ModelError(
            f"{len(set(trial.calls))} of its {num_layers} layers use an attention that can be"
            " paged; this architecture cannot be served with continuous batching",
            field="model",
        )
    shapes = {tuple(k_cache.shape[2:]) for k_cache, _ in trial.caches.values()}
    if len(shapes) != 1:
        raise ModelError(
            f"its layers have KV shapes {sorted(shapes)}; only one shape can be served",
            field="model",
        )
    num_kv_heads, head_dim = shapes.pop()
    windows = [window for window in trial.windows if window is not None]
    window = max(windows) if len(windows) == num_layers else None
    return max(trial.num_heads), num_kv_heads, head_dim, window


@torch.inference_mode()
def prove_state_is_paged(model: CausalModel, device: torch.device) -> None:
    """Raises ModelError if a sequence computed in two steps differs from the same in one."""
    tokens = _tokens(device)
    whole = _logits(model, tokens, _TrialAttention())
    trial = _TrialAttention()
    _logits(model, tokens[:_CUT], trial)
    trial.num_computed = _CUT
    continued = _logits(model, tokens[_CUT:], trial)
    difference = (whole[_CUT:] - continued).abs().max().item()
    # Sums run in another order; a lost state changes logits by about their own size.
    allowed = 1e-3 if model.dtype == torch.float32 else 0.1
    if not difference <= allowed * max(1.0, whole.abs().max().item()):
        raise ModelError(
            "it computes other logits when a sequence is continued than when it is computed at"
            f" once (by {difference:.3g}), so it keeps state outside of its attention; this"
            " architecture cannot be served with continuous batching",
            field="model",
        )


def _tokens(device: torch.device) -> Tensor:
    # Small ids exist in every vocabulary; distinct ones make positions matter.
    return torch.arange(3, 3 + _NUM_TOKENS, device=device)


def _logits(model: CausalModel, tokens: Tensor, trial: _TrialAttention) -> Tensor:
    rows = torch.arange(len(tokens), device=tokens.device)
    return model.forward(tokens, rows + trial.num_computed, trial, rows).float()
