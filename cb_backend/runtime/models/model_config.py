"""Reads a model folder's config.json.

What transformers makes of one takes a second of imports, so a config that states by itself all
that the native decoder reads of its family is taken as it stands; others go through transformers,
which knows what each architecture fills in. Engine thread, at load.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from cb_backend.errors import ModelError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    ModelConfig: TypeAlias = "PretrainedConfig | StatedConfig"


def _is_count(value: Any) -> bool:
    return type(value) is int and value > 0


def _is_count_or_none(value: Any) -> bool:
    return value is None or _is_count(value)


def _is_real(value: Any) -> bool:
    return type(value) is float


def _is_flag(value: Any) -> bool:
    return type(value) is bool


def _is_text(value: Any) -> bool:
    return type(value) is str


def _is_end(value: Any) -> bool:
    return type(value) is int or (type(value) is list and all(type(end) is int for end in value))


def _is_anything(value: Any) -> bool:
    return True


Checks = dict[str, Callable[[Any], bool]]

# What `spec.decoder_spec` reads of every family, and of a single one beyond that.
_STATED: Checks = {
    "model_type": _is_text,
    "vocab_size": _is_count,
    "hidden_size": _is_count,
    "intermediate_size": _is_count,
    "num_hidden_layers": _is_count,
    "num_attention_heads": _is_count,
    "num_key_value_heads": _is_count,
    "max_position_embeddings": _is_count,
    "rms_norm_eps": _is_real,
    "hidden_act": _is_text,
    "tie_word_embeddings": _is_flag,
    "eos_token_id": _is_end,
}
_STATED_BY: dict[str, Checks] = {
    "llama": {},
    "mistral": {"sliding_window": _is_count_or_none},
    "granite": {
        "attention_multiplier": _is_real,
        "embedding_multiplier": _is_real,
        "residual_multiplier": _is_real,
        "logits_scaling": _is_real,
    },
}
# What may be there: absent, it means nothing; or the forward pass does not depend on it.
_ALLOWED: Checks = {
    "attention_bias": _is_flag,
    "mlp_bias": _is_flag,
    "head_dim": _is_count_or_none,
    **dict.fromkeys(("dtype", "torch_dtype"), _is_anything),  # see _dtype
    **dict.fromkeys(("rope_parameters", "rope_scaling", "rope_theta"), _is_anything),
    **dict.fromkeys(("architectures", "attention_dropout", "bos_token_id"), _is_anything),
    **dict.fromkeys(("initializer_range", "pad_token_id", "pretraining_tp"), _is_anything),
    **dict.fromkeys(("transformers_version", "unk_token_id", "use_cache"), _is_anything),
}


class StatedConfig(SimpleNamespace):
    """The fields of a config.json that leaves nothing to a default."""


def read_config(folder: Path) -> ModelConfig:
    """Raises ModelError when there is no config, or none that can be used."""
    path = folder / "config.json"
    if not path.is_file():
        raise ModelError(f"no model in {folder}: config.json is missing", field="model")
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot use the config in {folder}: {error}", field="model") from error
    return stated_config(fields) or transformers_config(folder)


def transformers_config(folder: Path) -> PretrainedConfig:
    """Raises ModelError for a model that transformers does not know or whose config it refuses."""
    import transformers
    from transformers import CONFIG_MAPPING, AutoConfig

    try:
        fields = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        model_type = fields.get("model_type")
        if model_type not in CONFIG_MAPPING:
            raise ModelError(
                f"transformers {transformers.__version__} does not know model_type"
                f" {model_type!r} of {folder}; code that comes with a model is never run",
                field="model",
            )
        config: PretrainedConfig = AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except ModelError:
        raise
    except Exception as error:  # each architecture checks its fields in ways of its own
        raise ModelError(f"cannot use the config in {folder}: {error}", field="model") from error
    return config


def stated_config(fields: Any) -> StatedConfig | None:
    """None for whatever is missing, unusual or wrong: transformers then fills it in or refuses it.

    What is taken means the same to the native decoder as transformers' reading of it.
    """
    if not isinstance(fields, dict):
        return None
    model_type = fields.get("model_type")
    if not isinstance(model_type, str) or model_type not in _STATED_BY:
        return None
    fields = {name: value for name, value in fields.items() if not name.startswith("_")}
    stated = _STATED | _STATED_BY[model_type]
    checks = stated | _ALLOWED
    if stated.keys() - fields.keys() or fields.keys() - checks.keys():
        return None
    if not all(checks[name](value) for name, value in fields.items()):
        return None
    theta, dtype = _rope_theta(fields), _dtype(fields)
    if theta is None or dtype is None or fields["hidden_size"] % fields["num_attention_heads"]:
        return None
    rope = {"rope_type": "default", "rope_theta": theta}
    return StatedConfig(**fields | {"rope_parameters": rope, "dtype": dtype})


def _rope_theta(fields: dict[str, Any]) -> float | None:
    """Of a rotation without scaling, in the field of transformers 5 or in those before it."""
    stated = fields.get("rope_parameters")
    if stated is None:
        stated = {"rope_type": "default", "rope_theta": fields.get("rope_theta")}
        scaled = fields.get("rope_scaling") is not None
    else:
        scaled = not fields.keys().isdisjoint({"rope_theta", "rope_scaling"})
    if scaled or not isinstance(stated, dict) or stated.keys() != {"rope_type", "rope_theta"}:
        return None
    theta = stated["rope_theta"]
    plain = stated["rope_type"] == "default" and type(theta) in (int, float) and theta > 0
    return float(theta) if plain else None


def _dtype(fields: dict[str, Any]) -> torch.dtype | None:
    names = [fields[name] for name in ("dtype", "torch_dtype") if name in fields]
    if len(names) != 1 or names[0] not in ("float32", "bfloat16", "float16"):
        return None
    dtype: torch.dtype = getattr(torch, names[0])
    return dtype
