"""The matrix products of a dense native model, by the names of its modules."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from cb_backend.runtime.models.model_config import read_config
from cb_backend.runtime.models.spec import DecoderSpec, NotCoveredError, decoder_spec


@dataclass(frozen=True)
class LinearShape:
    name: str
    width: int  # N, outputs
    depth: int  # K, inputs
    gated: bool = False  # a gate over an up: half as many outputs leave the kernel

    @property
    def size(self) -> int:
        return self.width * self.depth


def spec_of(model_folder: str) -> DecoderSpec:
    try:
        spec = decoder_spec(read_config(Path(model_folder)))
    except NotCoveredError as reason:
        sys.exit(f"error: this measures the native decoder, which does not take it: {reason}")
    if any(layer.experts for layer in spec.layers):
        sys.exit("error: this measures dense models; which experts run depends on the text")
    return spec


def layer_shapes(spec: DecoderSpec) -> list[LinearShape]:
    q_width = spec.num_heads * spec.head_dim
    qkv_width = q_width + 2 * spec.num_kv_heads * spec.head_dim
    gated = spec.activation == "silu"
    return [
        LinearShape("qkv", qkv_width, spec.hidden_size),
        LinearShape("output", spec.hidden_size, q_width),
        LinearShape("gate_up", 2 * spec.intermediate_size, spec.hidden_size, gated),
        LinearShape("down", spec.hidden_size, spec.intermediate_size),
    ]


def lm_head_shape(spec: DecoderSpec) -> LinearShape:
    return LinearShape("lm_head", spec.vocab_size, spec.hidden_size)


def layers_size(spec: DecoderSpec) -> int:
    """Weights of all layers' products: what each token of a prompt is multiplied with."""
    return len(spec.layers) * sum(shape.size for shape in layer_shapes(spec))


def streamed_size(spec: DecoderSpec) -> int:
    """Weights that each step of one request reads."""
    return layers_size(spec) + lm_head_shape(spec).size
