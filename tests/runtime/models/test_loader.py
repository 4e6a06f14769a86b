"""What cannot be served is refused at load time, with the reason."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from cb_backend.config import EngineConfig
from cb_backend.errors import ConfigError, ModelError
from cb_backend.runtime import device
from cb_backend.runtime.device import choose_device, choose_dtype
from cb_backend.runtime.models.loader import load_model
from tests.models import FALLBACK, LLAMA, NATIVE, REFUSED, VOCAB_SIZE, TinyModel

CPU = torch.device("cpu")
PROMPT = torch.tensor([[5, 6, 7, 8, 9]])


def _load(folder: Path, **changes: object) -> object:
    settings: dict[str, object] = {"model": str(folder), "dtype": "float32"}
    return load_model(EngineConfig(**(settings | changes)), CPU)[0]  # type: ignore[arg-type]


@pytest.mark.parametrize("tiny", REFUSED, ids=str)
def test_a_model_with_state_outside_our_attention_is_refused(
    tiny: TinyModel, tmp_path: Path
) -> None:
    tiny.save(tmp_path)
    with pytest.raises(ModelError, match="cannot be served with continuous batching"):
        _load(tmp_path)


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        _load(tmp_path / "nothing")


def test_a_broken_config_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="cannot use the config"):
        _load(tmp_path)


def test_an_unknown_architecture_is_refused_and_its_code_not_run(tmp_path: Path) -> None:
    config = {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Mine"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "mine.py").write_text("raise SystemExit('this must not run')")
    with pytest.raises(ModelError, match="mine"):
        _load(tmp_path)


def test_logits_that_are_divided_by_nothing_are_refused(tmp_path: Path) -> None:
    (granite,) = (tiny for tiny in NATIVE if tiny.name == "granite")
    granite.save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"logits_scaling": 0.0}))
    with pytest.raises(ModelError, match=r"logits_scaling 0\.0"):
        _load(tmp_path)


@pytest.mark.parametrize("implementation", ["auto", "native", "transformers"])
def test_weights_in_another_format_are_refused(tmp_path: Path, implementation: str) -> None:
    LLAMA.save(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    torch.save(weights, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match="no safetensors weights"):
        _load(tmp_path, implementation=implementation)


def test_a_missing_weight_is_named(tmp_path: Path) -> None:
    LLAMA.save(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.self_attn.k_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"lack 'model\.layers\.1\.self_attn\.k_proj\.weight'"):
        _load(tmp_path)


def test_a_weight_of_another_shape_is_named(tmp_path: Path) -> None:
    LLAMA.save(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"] = torch.zeros(81, 48)
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.up_proj\.weight is \[81, 48\]"):
        _load(tmp_path)


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    LLAMA.save(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ModelError, match="cannot read"):
        _load(tmp_path)


def test_weights_the_decoder_would_ignore_send_the_model_to_transformers(tmp_path: Path) -> None:
    LLAMA.save(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(48)
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"no place for 1 weights: .*q_proj\.bias"):
        _load(tmp_path, implementation="native")


@pytest.mark.parametrize("heads", [(6, 4), (2, 4)], ids=str)
def test_heads_that_cannot_share_the_kv_heads_are_refused(
    tmp_path: Path, heads: tuple[int, int]
) -> None:
    """The kernels in C would leave out the query heads that remain, or divide by zero."""
    changes = {"num_attention_heads": heads[0], "num_key_value_heads": heads[1], "head_dim": 32}
    TinyModel("uneven", "llama", changes | {"intermediate_size": 96}).save(tmp_path)
    with pytest.raises(ModelError, match=f"{heads[1]} KV heads, which {heads[0]} query heads"):
        _load(tmp_path, dtype="bfloat16")


@pytest.mark.parametrize("tiny", NATIVE, ids=str)
def test_a_bias_in_a_config_whose_family_has_none_is_not_asked_for(
    tiny: TinyModel, tmp_path: Path
) -> None:
    stated = {"attention_bias": True, "mlp_bias": True}
    dataclasses.replace(tiny, changes=tiny.changes | stated).save(tmp_path)
    _load(tmp_path, implementation="native")


@pytest.mark.parametrize("value", ["many", None, -1, [2]])
def test_a_config_that_transformers_refuses_in_its_own_way_is_a_model_error(
    tmp_path: Path, value: object
) -> None:
    LLAMA.save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": value}))
    with pytest.raises(ModelError):
        _load(tmp_path)


def test_native_that_was_asked_for_and_does_not_cover_raises(tmp_path: Path) -> None:
    FALLBACK[0].save(tmp_path)
    with pytest.raises(ModelError, match="'gpt_neox' is not one of its families"):
        _load(tmp_path, implementation="native")


def test_an_unknown_activation_is_not_covered(tmp_path: Path) -> None:
    TinyModel("relu", "llama", {"hidden_act": "relu"}).save(tmp_path)
    with pytest.raises(ModelError, match="activation 'relu'"):
        _load(tmp_path, implementation="native")
    _load(tmp_path)


def test_a_sharded_checkpoint_is_read_through_its_index(tmp_path: Path) -> None:
    model = LLAMA.build()
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="20KB")
    assert (tmp_path / "many" / "model.safetensors.index.json").is_file()
    one, many = _load(tmp_path / "one"), _load(tmp_path / "many")
    ids = torch.arange(VOCAB_SIZE)
    assert torch.equal(one.embedding(ids), many.embedding(ids))  # type: ignore[attr-defined]
    shard = sorted((tmp_path / "many").glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ModelError, match=f"{shard.name}, which does not exist"):
        _load(tmp_path / "many")


def test_rotation_that_depends_on_length_ends_the_context_where_it_is_constant(
    tmp_path: Path,
) -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0, 1.5, 2.0, 2.5],
        "long_factor": [2.0, 3.0, 4.0, 5.0],
        "original_max_position_embeddings": 64,
    }
    tiny = TinyModel(
        "long", "phi3", {"rope_parameters": rope, "original_max_position_embeddings": 64}
    )
    tiny.save(tmp_path)
    assert _load(tmp_path).geometry.max_context == 64  # type: ignore[attr-defined]


def test_a_device_that_is_not_there_is_refused() -> None:
    for name in ("cuda:77", "tpu", "meta"):
        with pytest.raises(ConfigError, match=name):
            choose_device(name)
    assert choose_device("cpu") == CPU


def test_auto_dtype_is_the_stored_one_unless_the_cpu_is_slow_in_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device, "multiplies_bfloat16", lambda: False)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
    assert choose_dtype("auto", torch.bfloat16, CPU) == torch.bfloat16
    assert choose_dtype("auto", torch.float16, CPU) == torch.float32
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    assert choose_dtype("auto", torch.bfloat16, CPU) == torch.float32
    monkeypatch.setattr(device, "multiplies_bfloat16", lambda: True)
    assert choose_dtype("auto", torch.bfloat16, CPU) == torch.bfloat16
    assert choose_dtype("bfloat16", torch.float32, CPU) == torch.bfloat16
    assert choose_dtype("auto", torch.float16, torch.device("cuda")) == torch.float16
    assert choose_dtype("auto", None, CPU) == torch.float32
