"""placeholder"""
from __future__ import annotations
from pathlib import Path
import torch
from transformers import PretrainedConfig
from cb_backend.errors import ModelError
from cb_backend.runtime.models.interface import CausalModel

def load_fallback(folder: Path, config: PretrainedConfig, dtype: torch.dtype, device: torch.device) -> CausalModel:
    raise ModelError(f"model_type {config.model_type!r} is not supported yet")
