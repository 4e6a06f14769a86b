"""Tiny random models in the Hugging Face layout, the oracle of every test that needs a model.

Weights are drawn wide enough that greedy tokens depend on every part of the model: at the usual
initialisation all logits of a tiny model are nearly equal, and a wrong one would not show.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCAB_SIZE = 199

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@dataclass(frozen=True)
class TinyModel:
    """One case: a family and what its config changes."""

    name: str
    model_type: str
    changes: dict[str, Any] = field(default_factory=dict)
    native: bool = True

    def __str__(self) -> str:
        return self.name

    def build(self, seed: int = 0) -> PreTrainedModel:
        """The model in float32, evaluation mode."""
        config = AutoConfig.for_model(self.model_type, **(_COMMON | self.changes))
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
                elif "embed" not in name:
                    parameter.normal_(std=parameter.shape[-1] ** -0.5 * 1.5)
                else:
                    parameter.normal_(std=0.5)
        return model.eval()

    def save(self, folder: Path, seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
        """Write the model as a local folder, and return that folder."""
        self.build(seed).to(dtype).save_pretrained(folder)
        return folder


_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
_GEMMA = {"head_dim": 12, "query_pre_attn_scalar": 20, "sliding_window": 9}
_EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}

NATIVE = (
    TinyModel("llama", "llama"),
    TinyModel("llama-tied", "llama", {"tie_word_embeddings": True, "num_key_value_heads": 6}),
    TinyModel("llama-biases", "llama", {"attention_bias": True, "mlp_bias": True}),
    TinyModel("llama-rope3", "llama", {"rope_parameters": _LLAMA3_ROPE}),
    TinyModel(
        "llama-linear",
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}},
    ),
    TinyModel("llama-yarn", "llama", {"rope_parameters": _YARN_ROPE}),
    TinyModel("llama-gelu-head20", "llama", {"hidden_act": "gelu", "head_dim": 20}),
    TinyModel("mistral", "mistral", {"sliding_window": None}),
    TinyModel("mistral-window", "mistral", {"sliding_window": 7}),
    TinyModel("qwen2", "qwen2"),
    TinyModel(
        "qwen2-window",
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 10, "max_window_layers": 1},
    ),
    TinyModel("qwen3", "qwen3", {"head_dim": 16}),
    TinyModel("phi3", "phi3"),
    TinyModel(
        "phi3-partial",
        "phi3",
        {
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
            },
        },
    ),
    TinyModel("gemma", "gemma", {"head_dim": 12}),
    TinyModel("gemma2", "gemma2", _GEMMA),
    TinyModel(
        "gemma3",
        "gemma3_text",
        _GEMMA
        | {
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                "full_attention": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
            },
        },
    ),
    TinyModel("smollm3", "smollm3", {"no_rope_layers": [1, 0, 1]}),
    TinyModel(
        "granite",
        "granite",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.7,
            "attention_multiplier": 0.4,
            "logits_scaling": 2.0,
        },
    ),
    TinyModel("olmo2", "olmo2"),
    TinyModel("mixtral", "mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    TinyModel("qwen3-moe", "qwen3_moe", _EXPERTS | {"mlp_only_layers": [1], "head_dim": 16}),
    TinyModel("qwen3-moe-normed", "qwen3_moe", _EXPERTS | {"norm_topk_prob": True}),
)

FALLBACK = tuple(
    TinyModel(name, name, changes, native=False)
    for name, changes in {
        "gpt_neox": {},
        "gpt2": {"n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 256},
        "opt": {"ffn_dim": 80, "word_embed_proj_dim": 48, "pad_token_id": 0},
        "phi": {},
        "stablelm": {},
        "starcoder2": {"sliding_window": 9},
        "cohere2": {"sliding_window": 9},
        "gpt_oss": {
            "sliding_window": 9,
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
        "glm4": {"head_dim": 8},
        "nemotron": {},
        "qwen2_moe": _EXPERTS | {"shared_expert_intermediate_size": 32},
        "olmo3": {"sliding_window": 9},
    }.items()
)

REFUSED = tuple(
    TinyModel(name, name, changes, native=False)
    for name, changes in {
        "falcon": {},
        "bloom": {"n_head": 6, "n_layer": 3},
        "mamba": {},
        "lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
        "qwen3_next": _EXPERTS | {"shared_expert_intermediate_size": 32},
    }.items()
)

LLAMA = NATIVE[0]
