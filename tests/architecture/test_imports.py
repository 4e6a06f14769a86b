"""Who may import whom. The table is the drawing of the layers; every file is held to it."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import pytest

from tests.architecture.source import (
    ALL_FOLDERS,
    PRODUCT_FOLDERS,
    SourceFile,
    imports,
    is_within,
    source_files,
)

SHARED = ("cb_backend.config", "cb_backend.errors", "cb_backend.limits")


@dataclass(frozen=True)
class Layer:
    ours: tuple[str, ...]  # packages of this project that it may import
    third_party: tuple[str, ...] = ()
    forbidden: tuple[str, ...] = ()  # modules of the standard library


LAYERS = {
    "cb_backend.core": Layer(
        ours=("cb_backend.core", *SHARED),
        # It decides, so the same events must give the same decisions.
        forbidden=("threading", "asyncio", "time", "random", "secrets", "os", "queue"),
    ),
    "cb_backend.engine": Layer(
        ours=("cb_backend.engine", "cb_backend.core", *SHARED), forbidden=("asyncio",)
    ),
    "cb_backend.runtime": Layer(
        ours=("cb_backend.runtime", "cb_backend.core", "cb_kernels", *SHARED),
        third_party=("torch", "transformers", "safetensors", "numpy"),
        # It runs wherever the engine thread runs it.
        forbidden=("threading", "asyncio", "queue"),
    ),
    "cb_backend.serving": Layer(
        ours=("cb_backend.serving", "cb_backend.engine", "cb_backend.core", *SHARED),
        third_party=(
            "aiohttp",
            "bentoml",
            "huggingface_hub",
            "jinja2",
            "prometheus_client",
            "pydantic",
            "safetensors",
            "starlette",
            "tokenizers",
            "transformers",
        ),
    ),
    "cb_backend.planning": Layer(
        ours=("cb_backend.planning", "cb_backend.core", *SHARED),
        third_party=("matplotlib", "numpy"),
        forbidden=("threading", "asyncio", "time", "queue"),  # its clock is a virtual one
    ),
    "cb_backend.__main__": Layer(ours=("cb_backend.planning", *SHARED)),
    "cb_kernels": Layer(ours=("cb_kernels",), third_party=("torch", "triton")),
    "cb_backend.config": Layer(ours=("cb_backend.errors",)),
    "cb_backend.limits": Layer(ours=("cb_backend.errors",)),
    "cb_backend.errors": Layer(ours=()),
    "cb_backend": Layer(ours=()),  # the package's own __init__
}
# The services ask it for an engine; it alone sees all layers.
FACTORY = "cb_backend.factory"
# factory.py knows every layer. default_model.py is a program of its own, outside of them.
EXCEPTIONS = (FACTORY, "cb_backend.default_model")
MAY_IMPORT_FACTORY = "cb_backend.serving.services"


def violations(file: SourceFile) -> list[str]:
    """One line for each import that the table does not allow."""
    if file.module in EXCEPTIONS:
        return []
    name = max((name for name in LAYERS if is_within(file.module, name)), key=len)
    if name == "cb_backend" and file.module != name:
        return [f"{file}: belongs to no layer"]
    layer = LAYERS[name]
    return [
        f"{file}:{line}: {name} may not import {module}"
        for line, module in imports(file)
        if not _allowed(file, layer, module)
    ]


def _allowed(file: SourceFile, layer: Layer, module: str) -> bool:
    top = module.partition(".")[0]
    if is_within(module, FACTORY):
        return file.module == MAY_IMPORT_FACTORY
    if top in ("cb_backend", "cb_kernels"):
        return any(is_within(module, package) for package in layer.ours)
    if top in sys.stdlib_module_names:
        return top not in layer.forbidden
    return top in layer.third_party


@pytest.mark.parametrize("file", source_files(*PRODUCT_FOLDERS), ids=str)
def test_a_file_imports_only_what_its_layer_may(file: SourceFile) -> None:
    assert violations(file) == []


@pytest.mark.parametrize("file", source_files(*ALL_FOLDERS), ids=str)
def test_nothing_imports_the_kernels_folder(file: SourceFile) -> None:
    # Hugging Face publishes a package of that name, and transformers probes for it.
    assert [line for line, module in imports(file) if is_within(module, "kernels")] == []


def test_the_kernels_folder_is_no_package() -> None:
    assert "kernels/__init__.py" not in [file.path for file in source_files("kernels")]


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("cb_backend/core/planted.py", "import torch"),
        ("cb_backend/core/planted.py", "def later():\n    import time"),
        ("cb_backend/core/planted.py", "from random import Random"),
        ("cb_backend/core/planted.py", "from cb_backend.engine import engine"),
        ("cb_backend/core/planted.py", "from ..serving import services"),
        ("cb_backend/core/planted.py", "from .. import engine"),
        ("cb_backend/core/__init__.py", "from ..runtime import sampler"),
        ("cb_backend/engine/planted.py", "import torch.cuda"),
        ("cb_backend/engine/planted.py", "import asyncio"),
        ("cb_backend/engine/planted.py", "from cb_backend.runtime.sampler import Sampler"),
        ("cb_backend/runtime/models/planted.py", "from threading import Thread"),
        ("cb_backend/runtime/planted.py", "import bentoml"),
        ("cb_backend/runtime/planted.py", "from cb_backend.engine.stats import EngineStats"),
        ("cb_backend/serving/planted.py", "async def f():\n    import torch"),
        ("cb_backend/serving/planted.py", "from cb_backend.runtime.sampler import Sampler"),
        ("cb_backend/serving/planted.py", "from cb_backend import factory"),
        ("cb_backend/serving/planted.py", "import cb_kernels"),
        ("cb_backend/planted.py", "import json"),
        ("kernels/cb_kernels/planted.py", "from cb_backend.errors import CBError"),
    ],
)
def test_a_planted_import_is_found(path: str, text: str) -> None:
    assert len(violations(SourceFile(path, text))) == 1


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("cb_backend/core/planted.py", "from cb_backend import limits"),
        ("cb_backend/engine/planted.py", "import queue, threading, time"),
        ("cb_backend/runtime/models/planted.py", "from ..sampler import Sampler\nimport torch"),
        ("cb_backend/serving/services.py", "from cb_backend.factory import create_engine"),
        ("cb_backend/serving/planted.py", "import asyncio, bentoml\nfrom ..core import request"),
    ],
)
def test_an_allowed_import_is_let_through(path: str, text: str) -> None:
    assert violations(SourceFile(path, text)) == []
