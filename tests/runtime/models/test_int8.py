"""Int8 weights: close to the model as it is stored, and the same by every way through it."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import pytest
import torch
from cb_kernels import Int8Linear, PackedLinear
from cb_kernels.cpu.library import kernels

from cb_backend.config import EngineConfig
from cb_backend.errors import ConfigError
from cb_backend.runtime.models.decoder import Decoder
from cb_backend.runtime.models.linear import Linear
from cb_backend.runtime.models.loader import load_model
from cb_backend.runtime.models.mlp import Router
from tests.models import FALLBACK, NATIVE, VOCAB_SIZE, TinyModel
from tests.runtime.driving import Driver, load_runner, prompt_of
from tests.runtime.logits import packed_logits
from tests.runtime.models.test_plain_decoder import PLAIN

PROMPTS = [prompt_of(length, seed=length) for length in (1, 16, 5, 40, 33, 150)]
BY_C = TinyModel("by-c", "llama", {"vocab_size": 208, "head_dim": 32, "intermediate_size": 96})
CPU = torch.device("cpu")


def load(
    tiny: TinyModel, folder: Path, dtype: str = "float32", quantization: str = "int8"
) -> Decoder:
    config = EngineConfig(
        model=str(tiny.save(folder)),
        dtype=dtype,  # type: ignore[arg-type]
        quantization=quantization,  # type: ignore[arg-type]
    )
    model, _ = load_model(config, CPU)
    assert isinstance(model, Decoder)
    return model


@pytest.fixture
def _needs_the_kernels() -> None:
    c = kernels()
    if c is None or c.int8 is None:
        pytest.skip("no int8 and bfloat16 products in C on this machine")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("tiny", [BY_C, *NATIVE[:4], NATIVE[12]], ids=str)
def test_logits_stay_close_to_the_unrounded_model(
    tiny: TinyModel, dtype: str, tmp_path: Path
) -> None:
    expected = packed_logits(load(tiny, tmp_path, quantization="none"), PROMPTS)
    for one, other in zip(
        packed_logits(load(tiny, tmp_path, dtype), PROMPTS), expected, strict=True
    ):
        assert (one.float() - other).norm() / other.norm() < 0.08


@pytest.mark.usefixtures("_needs_the_kernels")
@pytest.mark.parametrize("tiny", PLAIN, ids=str)
def test_in_one_call_as_one_by_one_alone_as_among_others(tiny: TinyModel, tmp_path: Path) -> None:
    in_16s = dataclasses.replace(tiny, changes=tiny.changes | {"vocab_size": 208})
    model = load(in_16s, tmp_path, "bfloat16")
    together = packed_logits(model, PROMPTS, block_size=16)
    for prompt, logits in zip(PROMPTS, together, strict=True):
        assert torch.equal(packed_logits(model, [prompt], block_size=16)[0], logits)
    plain, model._plain = model._plain, None
    assert plain is not None
    one_by_one = packed_logits(model, PROMPTS, block_size=16)
    for actual, expected in zip(together, one_by_one, strict=True):
        if tiny.model_type == "qwen3":  # torch norms its heads, and rounds in another order
            assert (actual - expected).norm() / expected.norm() < 0.05
        else:
            assert torch.equal(actual, expected)


@pytest.mark.usefixtures("_needs_the_kernels")
def test_without_the_int8_kernel_layers_run_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_c = packed_logits(load(BY_C, tmp_path, "bfloat16"), PROMPTS, block_size=16)
    monkeypatch.setattr(kernels(), "int8", None)
    model = load(BY_C, tmp_path, "bfloat16")
    assert model._plain is None
    without = packed_logits(model, PROMPTS, block_size=16)
    for actual, expected in zip(without, with_c, strict=True):
        assert (actual.float() - expected.float()).norm() / expected.float().norm() < 0.03


def test_every_linear_is_rounded_but_a_router_and_the_embedding_stays(tmp_path: Path) -> None:
    experts = next(tiny for tiny in NATIVE if str(tiny) == "mixtral")
    model = load(experts, tmp_path / "experts")
    routers = [part.scores for part in model.modules() if isinstance(part, Router)]
    assert len(routers) == 3
    for linear in model.modules():
        if isinstance(linear, Linear):
            assert isinstance(linear.kernel, Int8Linear) == (linear not in routers)
    tied = next(tiny for tiny in NATIVE if str(tiny) == "llama-tied")
    ids = torch.arange(VOCAB_SIZE)
    stored = load(tied, tmp_path / "tied", quantization="none").embedding(ids)
    assert torch.equal(load(tied, tmp_path / "tied").embedding(ids), stored)


def test_what_multiplies_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    load(NATIVE[0], tmp_path)  # 199 outputs of its head are for torch
    lines = [line for line in caplog.messages if line.startswith("quantization: int8")]
    assert len(lines) == 1
    assert "torch multiplies" in lines[0]
    assert "of 13 weights" in lines[0]


def test_a_model_that_is_not_native_is_refused(tmp_path: Path) -> None:
    FALLBACK[0].save(tmp_path)
    config = EngineConfig(model=str(tmp_path), quantization="int8")
    with pytest.raises(ConfigError, match=r"'int8' needs the native decoder.*none") as caught:
        load_model(config, CPU)
    assert caught.value.field == "quantization"


def test_another_device_is_refused(tmp_path: Path) -> None:
    BY_C.save(tmp_path)
    config = EngineConfig(model=str(tmp_path), dtype="bfloat16", quantization="int8")
    with pytest.raises(ConfigError, match="'int8' is for the CPU, and the device is cuda:0"):
        load_model(config, torch.device("cuda:0"))


def test_transformers_own_code_cannot_be_quantized() -> None:
    with pytest.raises(ConfigError, match="needs the native decoder") as caught:
        EngineConfig(model="m", quantization="int8", implementation="transformers")
    assert caught.value.field == "quantization"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_request_that_is_not_finite_fails_alone(tmp_path: Path, dtype: str) -> None:
    BY_C.save(tmp_path)
    settings = {"dtype": dtype, "quantization": "int8", "block_size": 16}
    runner = load_runner(tmp_path, **settings)
    assert isinstance(runner._model, Decoder)
    driver = Driver(runner)
    for name, last in (("sound", 50), ("hurt", 60), ("also sound", 70)):
        driver.add(name, [5, 6, 7, last])
    with torch.inference_mode():
        weight = runner._model.embedding.weight
        assert isinstance(weight, torch.Tensor)
        weight[60] = torch.nan
    result = driver.step()
    assert set(result.failed) == {"hurt"}
    assert set(result.token_ids) == {"sound", "also sound"}


def test_without_quantization_nothing_is_rounded(tmp_path: Path) -> None:
    model = load(BY_C, tmp_path, "bfloat16", quantization="none")
    linears = [part.kernel for part in model.modules() if isinstance(part, Linear)]
    assert all(kernel is None or isinstance(kernel, PackedLinear) for kernel in linears)
