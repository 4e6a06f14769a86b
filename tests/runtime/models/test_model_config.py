"""A config read without transformers means what it means with it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from cb_backend.errors import ModelError
from cb_backend.runtime.models.loader import eos_token_ids
from cb_backend.runtime.models.model_config import (
    StatedConfig,
    read_config,
    stated_config,
    transformers_config,
)
from cb_backend.runtime.models.rope import Rope
from cb_backend.runtime.models.spec import NotCoveredError, decoder_spec
from tests.models import NATIVE, TinyModel

if TYPE_CHECKING:
    from cb_backend.runtime.models.model_config import ModelConfig

# In the layout of a hub's file of 2024 (no head_dim, flat rope fields), and of transformers 5.
OLD = {
    "model_type": "llama",
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "eos_token_id": 2,
    "head_dim": 8,
    "rope_theta": 500000.0,
    "rope_scaling": None,
    "torch_dtype": "bfloat16",
}
NEW = {name: value for name, value in OLD.items() if not name.startswith(("rope", "torch"))} | {
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "dtype": "float32",
    "attention_bias": True,
    "mlp_bias": False,
}
MISTRAL = OLD | {"model_type": "mistral", "sliding_window": 32}
ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 3, 12, 1.0, 0.5, 1e-5, "silu", "gelu", "float16", "x"),
    *([2, 5], [], {}, {"rope_type": "default", "rope_theta": 7}, {"rope_theta": 7.0}),
    {"rope_type": "linear", "rope_theta": 7.0, "factor": 2.0},
)
ALSO = (
    *("attention_bias", "mlp_bias", "sliding_window", "partial_rotary_factor", "hidden_activation"),
    *("rope_theta", "rope_scaling", "rope_parameters", "dtype", "torch_dtype", "layer_types"),
    *("num_key_value_heads", "head_dim", "quantization_config", "eos_token_id"),
)


def _meaning(folder: Path, config: ModelConfig) -> object:
    try:
        spec = decoder_spec(config)
    except (ModelError, NotCoveredError) as error:
        return str(error)
    rope = Rope(config, "default", spec.head_dim, torch.float64, torch.device("cpu"))
    cos, sin = rope.turns(torch.arange(9))
    turns = (cos.tolist(), sin.tolist())
    return spec, turns, getattr(config, "dtype", None), eos_token_ids(folder, config)


def _write(folder: Path, fields: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


@pytest.mark.parametrize("fields", [OLD, NEW, MISTRAL], ids=["old", "new", "mistral"])
def test_a_config_that_states_everything_is_taken_as_it_stands(
    fields: dict[str, Any], tmp_path: Path
) -> None:
    folder = _write(tmp_path, fields)
    config = read_config(folder)
    assert isinstance(config, StatedConfig)
    assert _meaning(folder, config) == _meaning(folder, transformers_config(folder))


@pytest.mark.parametrize("tiny", NATIVE, ids=str)
def test_every_native_config_means_the_same(tiny: TinyModel, tmp_path: Path) -> None:
    folder = tiny.save(tmp_path)
    expected = decoder_spec(transformers_config(folder))
    assert decoder_spec(read_config(folder)) == expected


def _changed(base: dict[str, Any]) -> SearchStrategy[dict[str, Any]]:
    names = st.sampled_from((*base, *ALSO))
    changes = st.dictionaries(names, st.sampled_from(ODD), max_size=3)
    missing = st.sets(st.sampled_from(tuple(base)), max_size=1)
    return st.builds(
        lambda change, gone: {k: v for k, v in (base | change).items() if k not in gone},
        changes,
        missing,
    )


@settings(max_examples=300, deadline=None)
@given(fields=st.sampled_from((OLD, NEW, MISTRAL)).flatmap(_changed))
def test_what_is_taken_as_it_stands_never_means_something_else(
    fields: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    config = stated_config(fields)
    if config is None:
        return  # transformers decides
    folder = _write(tmp_path_factory.getbasetemp() / "changed", fields)
    assert _meaning(folder, config) == _meaning(folder, transformers_config(folder))


@pytest.mark.parametrize("text", ["{", "[]", "null", '"llama"'])
def test_a_config_that_is_no_object_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match="config"):
        read_config(tmp_path)


def test_a_runner_of_a_stated_config_never_imports_transformers(tmp_path: Path) -> None:
    """It costs a second of the start and 80 MiB."""
    folder = TinyModel("llama", "llama").save(tmp_path)
    code = (
        "import sys\n"
        "from cb_backend.config import EngineConfig\n"
        "from cb_backend.runtime.model_runner import load_model_runner\n"
        f"load_model_runner(EngineConfig(model={str(folder)!r}, num_kv_blocks=8, device='cpu'))\n"
        "assert 'transformers' not in sys.modules\n"
        "assert 'sympy' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)
