"""From a local model folder to a model: reads the config and picks the implementation.

safetensors only, and no code from the folder is ever run. Engine thread.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig

from cb_backend.config import EngineConfig
from cb_backend.errors import ModelError
from cb_backend.runtime.device import choose_dtype
from cb_backend.runtime.models.checkpoint import Checkpoint
from cb_backend.runtime.models.interface import CausalModel
from cb_backend.runtime.models.native_loader import NativeLoader
from cb_backend.runtime.models.spec import NotCoveredError, decoder_spec

logger = logging.getLogger(__name__)


def load_model(config: EngineConfig, device: torch.device) -> tuple[CausalModel, str]:
    """The model and the implementation that serves it: "native" or "transformers".

    Raises ModelError when the folder, its config or its weights are missing or cannot be served.
    """
    folder = Path(config.model)
    model_config = read_config(folder)
    dtype = choose_dtype(config.dtype, getattr(model_config, "dtype", None), device)
    if config.implementation != "transformers":
        try:
            return _load_native(config, model_config, dtype, device), "native"
        except NotCoveredError as reason:
            if config.implementation == "native":
                raise ModelError(
                    f"the native decoder does not cover {folder.name}: {reason};"
                    " set implementation to auto or transformers",
                    field="implementation",
                ) from reason
            logger.info("implementation: transformers, since native lacks: %s", reason)
    # Here, since it imports transformers' modelling code: two seconds, and triton where it exists.
    from cb_backend.runtime.models.transformers_fallback import load_fallback

    return load_fallback(folder, model_config, dtype, device), "transformers"


def read_config(folder: Path) -> PretrainedConfig:
    path = folder / "config.json"
    if not path.is_file():
        raise ModelError(f"no model in {folder}: config.json is missing", field="model")
    try:
        model_type = json.loads(path.read_text(encoding="utf-8")).get("model_type")
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


def eos_token_ids(folder: Path, config: PretrainedConfig) -> tuple[int, ...]:
    """The ids that end a text: the generation config's, else the model config's."""
    path = folder / "generation_config.json"
    eos: Any = None
    if path.is_file():
        try:
            eos = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
        except (ValueError, AttributeError) as error:
            raise ModelError(f"{path} is not a generation config: {error}") from error
    if eos is None:
        eos = getattr(config, "eos_token_id", None)
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, list | tuple) else (int(eos),)


def _load_native(
    config: EngineConfig, model_config: PretrainedConfig, dtype: torch.dtype, device: torch.device
) -> CausalModel:
    spec = decoder_spec(model_config)
    with Checkpoint(Path(config.model)) as checkpoint:
        loader = NativeLoader(
            *(checkpoint, model_config, spec),
            dtype=dtype,
            device=device,
            deterministic=config.deterministic,
        )
        return loader.load()
