"""Serves a model through its own transformers code, with our paged attention inside.

transformers calls one attention function per layer; ours hands over to the step's attention.
Which architectures keep to that is not declared anywhere, so `load_fallback` proves it on the
loaded model before it serves. Engine thread.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
import transformers
from cb_kernels import HugePages
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModelForCausalLM, PretrainedConfig

from cb_backend.errors import ModelError
from cb_backend.runtime.models.checkpoint import Checkpoint
from cb_backend.runtime.models.interface import Attention, ModelGeometry, ModelRun
from cb_backend.runtime.models.linear import Linear, can_pack
from cb_backend.runtime.models.proof import observed_geometry, prove_state_is_paged
from cb_backend.runtime.models.spec import max_context

logger = logging.getLogger(__name__)

_INTERFACE = "cb_paged"

# The attention of the forward pass that runs in this context. Not a keyword of the call: some
# architectures (nemotron, stablelm) do not hand keywords on to their attention.
_step_attention: ContextVar[Attention] = ContextVar("step_attention")


class TransformersModel:
    """See `interface.CausalModel`. `geometry` is what the attention calls showed."""

    def __init__(
        self,
        model: nn.Module,
        config: PretrainedConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._model = model
        self._dtype = dtype
        num_heads, num_kv_heads, head_dim, window = observed_geometry(
            self, config.num_hidden_layers, device
        )
        self._geometry = ModelGeometry(
            num_layers=config.num_hidden_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            vocab_size=config.vocab_size,
            max_context=max_context(config),
            window=window,
        )

    @property
    def geometry(self) -> ModelGeometry:
        return self._geometry

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    @property
    def is_capturable(self) -> bool:
        return False  # nobody knows what it waits for

    @property
    def can_prepare(self) -> bool:
        return False

    def is_batch_invariant(self, *, paged: bool) -> bool:
        return False  # its sums are torch's

    def prepare(
        self, token_ids: Tensor, attention: Attention, logit_rows: Tensor, *, only_best: bool
    ) -> ModelRun:
        raise AssertionError("it cannot prepare")

    def forward(
        self, token_ids: Tensor, positions: Tensor, attention: Attention, logit_rows: Tensor
    ) -> Tensor:
        token = _step_attention.set(attention)
        try:
            output = self._model(
                input_ids=token_ids[None],
                position_ids=positions[None],
                use_cache=False,
                logits_to_keep=logit_rows,
            )
        finally:
            _step_attention.reset(token)
        logits: Tensor = output.logits[0]
        return logits


def load_fallback(
    folder: Path, config: PretrainedConfig, dtype: torch.dtype, device: torch.device
) -> TransformersModel:
    """Raises ModelError when transformers cannot load the model, or when it computes something
    of a sequence outside of our attention and would therefore serve wrong text."""
    with Checkpoint(folder):  # refuses anything but safetensors
        pass
    # Under a name that has no masks: transformers then builds none, which our attention needs not,
    # and does not look, waiting for the device, whether a step's rows are packed.
    AttentionInterface.register(_INTERFACE, _attend)
    try:
        with _quiet():
            model: nn.Module = AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                attn_implementation=_INTERFACE,
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
            )
    except KeyError as error:
        # Architectures that choose their attention from a table of their own look ours up there.
        raise ModelError(
            f"{config.model_type!r} has no place for our attention; this architecture cannot be"
            " served with continuous batching",
            field="model",
        ) from error
    except (OSError, ValueError, ImportError) as error:
        raise ModelError(
            f"transformers cannot load {config.model_type!r} from {folder}: {error}",
            field="model",
        ) from error
    model = model.to(device)  # from_pretrained leaves it in evaluation mode
    try:
        served = TransformersModel(model, config, dtype=dtype, device=device)
        pack_linears(model, HugePages())
        prove_state_is_paged(served, device)
    except (TypeError, ValueError, AttributeError, RuntimeError, IndexError) as error:
        raise ModelError(f"{config.model_type!r} does not run on packed rows: {error}") from error
    except ModelError as error:
        raise ModelError(f"{config.model_type!r}: {error.message}", field="model") from error
    return served


def pack_linears(module: nn.Module, pages: HugePages) -> None:
    """Replace plain linear layers by packed ones, dropping each weight as it is packed."""
    for name, child in module.named_children():
        if type(child) is not nn.Linear:
            pack_linears(child, pages)
        elif can_pack(child.weight.device.type, child.weight.dtype):
            bias = None if child.bias is None else child.bias.detach()
            linear = Linear(child.weight.detach(), bias)
            linear.pack(pages)
            setattr(module, name, linear)


def _attend(
    module: nn.Module,
    query: Tensor,  # [1, H_q, T, D]
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    # transformers passes whatever an architecture has; what changes the result is named above.
    **_: Any,
) -> tuple[Tensor, None]:
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    attended = _step_attention.get().attend(
        int(module.layer_idx),  # type: ignore[arg-type]
        q,
        k,
        v,
        scale=scaling if scaling is not None else q.shape[-1] ** -0.5,
        sliding_window=sliding_window,
        soft_cap=softcap,
        sinks=s_aux,
    )
    return attended[None], None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without progress bars, which would write over the server's log."""
    shown = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers.utils.logging.enable_progress_bar()
