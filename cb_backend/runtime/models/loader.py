"""From a local model folder to a model: reads the config and picks the implementation.

safetensors only, and no code from the folder is ever run. Engine thread.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from cb_backend.config import EngineConfig
from cb_backend.errors import ConfigError, ModelError
from cb_backend.runtime.device import choose_dtype
from cb_backend.runtime.models.checkpoint import Checkpoint
from cb_backend.runtime.models.interface import CausalModel
from cb_backend.runtime.models.model_config import read_config, transformers_config
from cb_backend.runtime.models.native_loader import NativeLoader
from cb_backend.runtime.models.spec import NotCoveredError, decoder_spec

if TYPE_CHECKING:
    from cb_backend.runtime.models.model_config import ModelConfig

logger = logging.getLogger(__name__)


def load_model(config: EngineConfig, device: torch.device) -> tuple[CausalModel, str]:
    """The model and the implementation that serves it: "native" or "transformers".

    Raises ModelError when the folder, its config or its weights are missing or cannot be served,
    and ConfigError when they cannot be quantized as asked.
    """
    folder = Path(config.model)
    model_config = read_config(folder)
    dtype = choose_dtype(config.dtype, getattr(model_config, "dtype", None), device)
    if config.quantization == "int8" and device.type != "cpu":
        raise ConfigError(
            f"quantization 'int8' is for the CPU, and the device is {device}; set quantization to"
            " none, or device to cpu",
            field="quantization",
        )
    if config.implementation != "transformers":
        try:
            return _load_native(config, model_config, dtype, device), "native"
        except NotCoveredError as reason:
            if config.quantization == "int8":
                raise ConfigError(
                    f"quantization 'int8' needs the native decoder, which does not cover"
                    f" {folder.name}: {reason}; set quantization to none",
                    field="quantization",
                ) from reason
            if config.implementation == "native":
                raise ModelError(
                    f"the native decoder does not cover {folder.name}: {reason};"
                    " set implementation to auto or transformers",
                    field="implementation",
                ) from reason
            logger.info("implementation: transformers, since native lacks: %s", reason)
    # Here, since it imports transformers' modelling code: two seconds, and triton where it exists.
    from cb_backend.runtime.models.transformers_fallback import load_fallback

    return load_fallback(folder, transformers_config(folder), dtype, device), "transformers"


def eos_token_ids(folder: Path, config: ModelConfig) -> tuple[int, ...]:
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
    config: EngineConfig, model_config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> CausalModel:
    spec = decoder_spec(model_config)
    with Checkpoint(Path(config.model)) as checkpoint:
        loader = NativeLoader(
            *(checkpoint, model_config, spec),
            dtype=dtype,
            device=device,
            quantization=config.quantization,
            deterministic=config.deterministic,
        )
        return loader.load()
