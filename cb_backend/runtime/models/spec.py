"""Turns a model's config into the features the native decoder builds from.

A family is listed only when every feature of its config is understood here; anything else makes
`decoder_spec` say why not, and the model goes to the transformers fallback instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from cb_backend.errors import ModelError
from cb_backend.runtime.models.rope import LENGTH_DEPENDENT, rope_parameters

if TYPE_CHECKING:
    from cb_backend.runtime.models.model_config import ModelConfig

ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh")
_ROPE_TYPES = ("default", "linear", "llama3", "yarn", "dynamic", "longrope")


class NotCoveredError(Exception):
    """The native decoder lacks a feature of this config; the message names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsSpec:
    """A mixture of experts in place of a layer's MLP, and what its weights are called."""

    num_experts: int
    top_k: int
    intermediate_size: int
    normalize: bool  # the chosen experts' weights sum to 1
    block: str  # "mlp" or "block_sparse_moe"
    gate: str
    up: str
    down: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    sliding_window: int | None = None
    rope: str | None = "default"  # key of the rope parameters; None: no rotation
    experts: ExpertsSpec | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """Every feature of a decoder, as data."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_context: int
    norm_eps: float
    activation: str
    tied_embeddings: bool
    attention_scale: float
    layers: tuple[LayerSpec, ...]

    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    fused_weights: bool = False  # the checkpoint itself fuses QKV and gate+up (phi3)
    norm_adds_one: bool = False  # the norms scale by 1 + weight (gemma)
    pre_norms: bool = True
    post_norms: bool = False  # the sublayers' outputs are normed before they are added
    mlp_norm: str = "post_attention_layernorm"  # what the checkpoint calls the MLP's pre-norm
    head_norms: bool = False  # q and k are normed per head
    width_norms: bool = False  # q and k are normed over all heads at once (olmo2)
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_soft_cap: float | None = None

    @property
    def window(self) -> int | None:
        """Tokens that the widest layer's attention reaches back; None: to the first."""
        windows = [layer.sliding_window for layer in self.layers]
        bounded = [window for window in windows if window is not None]
        return max(bounded) if bounded and len(bounded) == len(windows) else None

    attention_soft_cap: float | None = None


def decoder_spec(config: ModelConfig) -> DecoderSpec:
    """Raises NotCoveredError with the reason, and ModelError for what no implementation can run."""
    family = _FAMILIES.get(config.model_type)
    if family is None:
        raise NotCoveredError(f"model_type {config.model_type!r} is not one of its families")
    if getattr(config, "quantization_config", None) is not None:
        raise NotCoveredError("the weights are quantized")
    spec = family(config, _common(config))
    if spec.activation not in ACTIVATIONS:
        raise NotCoveredError(f"activation {spec.activation!r}")
    for kind in {layer.rope for layer in spec.layers}:
        parameters = rope_parameters(config, kind)
        if parameters["rope_type"] not in _ROPE_TYPES:
            raise NotCoveredError(f"rope type {parameters['rope_type']!r}")
        # Elsewhere transformers' own code ignores the factor or not, depending on the rope type.
        if parameters.get("partial_rotary_factor", 1.0) != 1.0 and config.model_type != "phi3":
            raise NotCoveredError("partial rotary embedding in this family")
    return spec


def max_context(config: ModelConfig) -> int:
    """Tokens the model can take; to where its rotation is constant if that depends on length."""
    context: int = config.max_position_embeddings
    parameters = getattr(config, "rope_parameters", None) or {}
    for nested in [parameters, *(p for p in parameters.values() if isinstance(p, dict))]:
        if nested.get("rope_type") in LENGTH_DEPENDENT:
            original = nested.get("original_max_position_embeddings")
            context = min(context, original or context)
    return context


def _common(config: ModelConfig) -> DecoderSpec:
    head_dim = getattr(config, "head_dim", None)
    head_dim = head_dim or config.hidden_size // config.num_attention_heads
    activation = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None)
    bias = bool(getattr(config, "attention_bias", False))
    num_heads, num_kv_heads = config.num_attention_heads, config.num_key_value_heads
    if not num_kv_heads or num_heads % num_kv_heads:
        raise ModelError(
            f"its config has {num_kv_heads} KV heads, which {num_heads} query heads cannot share"
            " evenly",
            field="model",
        )
    return DecoderSpec(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_context=max_context(config),
        norm_eps=config.rms_norm_eps,
        activation=str(activation),
        tied_embeddings=bool(config.tie_word_embeddings),
        attention_scale=head_dim**-0.5,
        layers=(LayerSpec(),) * config.num_hidden_layers,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bool(getattr(config, "mlp_bias", False)),
    )


def _llama(config: ModelConfig, common: DecoderSpec) -> DecoderSpec:
    return common


def _mistral(config: ModelConfig, common: DecoderSpec) -> DecoderSpec:
    layer = LayerSpec(sliding_window=config.sliding_window)
    spec = replace(common, layers=(layer,) * config.num_hidden_layers)
    return replace(spec, qkv_bias=False, output_bias=False, mlp_bias=False)


def _qwen2(config: ModelConfig, common: DecoderSpec) -> DecoderSpec:
    spec = _typed_layers(config, common)
    return replace(spec, qkv_bias=True, output_bias=False, mlp_bias=False)


def _qwen3(config: ModelConfig, common: DecoderSpec) -> DecoderSpec:
    return replace(_typed_layers(config, common), head_norms=True, mlp_bias=False)


def _phi3(config: ModelConfig, common: DecoderSpec) -> DecoderSpec:
    return replace(_mistral(config, common), fused_weights=True)


def _gemma(config: ModelConfig, common: DecoderSpec) -> DecoderSpec:
    if getattr(config, "use_bidirectional_attention", None):
        raise NotCoveredError("bidirectional attention")
    return replace(
        common, norm_adds_one=True, embedding_scale=config.hidden_size**0.5, mlp_bias=False
    )


def _gemma2(config: ModelConfig, common: DecoderSpec) -> DecoderSpec:
    return replace(
        _typed_layers(config, _gemma(config, common)),
        post_norms=True,
        mlp_norm="pre_feedforward_layernorm",
        attention_scale=config.query_pre_attn_scalar**-0.5,
        logit_soft_cap=config.final_logit_softcapping,
        attention_soft_cap=config.attn_logit_softcapping,
    )


def _gemma3(config: ModelConfig, common: DecoderSpec) -> DecoderSpec:
    spec = replace(_gemma2(config, common), head_norms=True, attention_soft_cap=None)
    kinds = config.layer_types
    layers = (replace(layer, rope=kind) for layer, kind in zip(spec.layers, kinds, strict=True))
    return replace(spec, layers=tuple(layers))


def _smollm3(config: ModelConfig, common: DecoderSpec) -> DecoderSpec:
    spec = _typed_layers(config, common)
    if not config.use_sliding_window:
        spec = common
    layers = (
        replace(layer, rope="default" if rotated else None)
        for layer, rotated in zip(spec.layers, config.no_rope_layers, strict=True)
    )
    return replace(spec, layers=tuple(layers))


def _granite(config: ModelConfig, common: DecoderSpec) -> DecoderSpec:
    if not config.logits_scaling:
        raise ModelError(
            f"its config divides logits by logits_scaling {config.logits_scaling}", field="model"
        )
    return replace(
        common,
        attention_scale=config.attention_multiplier,
        embedding_scale=config.embedding_multiplier,
        residual_scale=config.residual_multiplier,
        logit_scale=1.0 / config.logits_scaling,
    )


def _olmo2(config: ModelConfig, common: DecoderSpec) -> DecoderSpec:
    return replace(common, pre_norms=False, post_norms=True, width_norms=True, mlp_bias=False)


def _mixtral(config: ModelConfig, common: DecoderSpec) -> DecoderSpec:
    experts = ExpertsSpec(
        num_experts=config.num_local_experts,
        top_k=config.num_experts_per_tok,
        intermediate_size=config.intermediate_size,
        normalize=True,
        block="block_sparse_moe",
        gate="w1",
        up="w3",
        down="w2",
    )
    layer = LayerSpec(sliding_window=config.sliding_window, experts=experts)
    spec = replace(common, layers=(layer,) * config.num_hidden_layers)
    return replace(spec, qkv_bias=False, output_bias=False)


def _qwen3_moe(config: ModelConfig, common: DecoderSpec) -> DecoderSpec:
    experts = ExpertsSpec(
        num_experts=config.num_experts,
        top_k=config.num_experts_per_tok,
        intermediate_size=config.moe_intermediate_size,
        normalize=config.norm_topk_prob,
        block="mlp",
        gate="gate_proj",
        up="up_proj",
        down="down_proj",
    )
    sparse = (
        index not in config.mlp_only_layers
        and config.num_experts > 0
        and (index + 1) % config.decoder_sparse_step == 0
        for index in range(config.num_hidden_layers)
    )
    layers = (
        LayerSpec(sliding_window=config.sliding_window, experts=experts if is_sparse else None)
        for is_sparse in sparse
    )
    return replace(common, layers=tuple(layers), head_norms=True, mlp_bias=False)


def _typed_layers(config: ModelConfig, spec: DecoderSpec) -> DecoderSpec:
    """Windows where the config's layer_types say so."""
    windows = {"full_attention": None, "sliding_attention": config.sliding_window}
    if unknown := set(config.layer_types) - set(windows):
        raise NotCoveredError(f"layer types {sorted(unknown)}")
    layers = (
        replace(layer, sliding_window=windows[kind])
        for layer, kind in zip(spec.layers, config.layer_types, strict=True)
    )
    return replace(spec, layers=tuple(layers))


_FAMILIES: dict[str, Callable[[ModelConfig, DecoderSpec], DecoderSpec]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "phi3": _phi3,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "smollm3": _smollm3,
    "granite": _granite,
    "olmo2": _olmo2,
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
}
