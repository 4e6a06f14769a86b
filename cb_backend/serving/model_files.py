"""Whether a folder holds what a model needs, told by its files alone: no torch, a few milliseconds.

Runs in the supervisor before any worker starts, so that a folder that lacks something ends the
command at once. What only shows while the weights are loaded, such as their shapes, is the
engine's to say.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

from safetensors import SafetensorError, safe_open

from cb_backend.errors import ConfigError

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_TOKENIZERS = ("tokenizer*", "vocab*", "*.model", "*.tiktoken")


@functools.cache  # one folder is asked about by each service
def check_model_files(folder: Path) -> None:
    """Raises ConfigError."""
    _check_config(folder / "config.json")
    for path in _weight_files(folder):
        try:
            # Reads the header, and compares the file's size with it.
            with safe_open(path, framework="np"):
                pass
        except (SafetensorError, OSError) as error:
            raise _unusable(path, str(error)) from error
    _check_tokenizer(folder)


def _check_config(path: Path) -> None:
    model_type = _json_object(path).get("model_type")
    if not isinstance(model_type, str):
        raise _unusable(path, f"its model_type must be a string, got {model_type!r}")


def _weight_files(folder: Path) -> list[Path]:
    index = folder / _INDEX
    if not index.is_file():
        if not (folder / _WEIGHTS).is_file():
            raise _unusable(
                folder,
                f"neither {_WEIGHTS} nor {_INDEX} is there; save the model with safetensors"
                " (other formats can run code and are refused)",
            )
        return [folder / _WEIGHTS]
    weight_map = _json_object(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise _unusable(index, "it has no weight_map")
    return [folder / str(name) for name in sorted(set(map(str, weight_map.values())))]


def _check_tokenizer(folder: Path) -> None:
    if not any(path.is_file() for pattern in _TOKENIZERS for path in folder.glob(pattern)):
        raise _unusable(folder, "it has no tokenizer; save the model's own tokenizer there")
    path = folder / "tokenizer.json"
    if path.is_file():
        _json_object(path)


def _json_object(path: Path) -> dict[str, object]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _unusable(path, str(error)) from error
    if not isinstance(data, dict):
        raise _unusable(path, "it is not a JSON object")
    return data


def _unusable(path: Path, why: str) -> ConfigError:
    return ConfigError(f"the model cannot be served: {path}: {why}", field="model")
