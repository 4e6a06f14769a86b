"""A folder that lacks something is refused by its files, before anything is loaded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from cb_backend.errors import ConfigError
from cb_backend.serving.model_files import check_model_files
from tests.e2e.tiny_model import write_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def copy(model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model, tmp_path / "copy"))


def write_index(folder: Path, index: object) -> None:
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def cut(path: Path, num_bytes: int) -> None:
    path.write_bytes(path.read_bytes()[:num_bytes])


def remove_tokenizer(folder: Path) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "broken config": (lambda f: (f / "config.json").write_text("{"), "Expecting"),
    "config of another kind": (lambda f: (f / "config.json").write_text("[]"), "no.* JSON object"),
    "no model type": (lambda f: (f / "config.json").write_text("{}"), "model_type"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "safetensors"),
    "empty weights": (lambda f: cut(f / "model.safetensors", 0), "header"),
    "half a header": (lambda f: cut(f / "model.safetensors", 100), "header"),
    "cut weights": (lambda f: cut(f / "model.safetensors", -1000), "not fully covered"),
    "a missing part": (
        lambda f: write_index(f, {"weight_map": {"a": "model-1.safetensors", "b": "gone"}}),
        "gone",
    ),
    "no index": (lambda f: write_index(f, {}), "weight_map"),
    "no tokenizer": (remove_tokenizer, "no tokenizer"),
    "broken tokenizer": (lambda f: (f / "tokenizer.json").write_text("{"), "tokenizer"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_folder_is_refused_with_what_is_wrong(copy: Path, case: str) -> None:
    breaking, said = BROKEN[case]
    breaking(copy)
    with pytest.raises(ConfigError, match=said) as refused:
        check_model_files(copy)
    assert str(copy) in refused.value.message


def test_a_whole_folder_is_let_through(model: Path, copy: Path) -> None:
    check_model_files(model)
    write_index(copy, {"weight_map": {"a": "model-1.safetensors"}})
    check_model_files(copy)
