"""The names that a user's code may rely on, and the names that nothing here may have."""

from __future__ import annotations

import ast
import re

import pytest

from tests.architecture.source import ALL_FOLDERS, SourceFile, source_files

# What a user's service imports. A name that leaves this list breaks somebody: say so in the
# changelog. A name that joins it is kept for good: be sure.
PUBLIC = {
    "cb_backend.config": {
        "Dtype",
        "EngineConfig",
        "Implementation",
        "KVCacheDtype",
        "POLICY_NAMES",
        "Quantization",
    },
    "cb_backend.core.policies": {
        "DeadlinePolicy",
        "FairPolicy",
        "Key",
        "POLICIES",
        "Policy",
        "PriorityPolicy",
        "policy_of",
    },
    "cb_backend.core.sampling_params": {"SamplingParams"},
    "cb_backend.errors": {
        "CBError",
        "ConfigError",
        "DeadlineError",
        "EngineDeadError",
        "EngineNotReadyError",
        "EngineUnavailableError",
        "ErrorInfo",
        "InternalError",
        "InvalidRequestError",
        "InvariantError",
        "ModelError",
        "OutOfBlocksError",
        "OverloadedError",
        "PromptTooLongError",
        "RecordingError",
        "RequestFailedError",
        "WrongThreadError",
        "error_from_info",
    },
    "cb_backend.factory": {"create_engine"},
}

# Each says that the class does something, and not what.
BANNED_CLASS = re.compile(r"(Manager|Handler|Processor|Helpers?|Utils?|Utility)$")
BANNED_MODULE = re.compile(r"(^|_)(managers?|handlers?|processors?|helpers?|utils?|misc|common)$")
BANNED_NAME = re.compile(r"(^|_)uid(_|$)")  # a request has a request_id


def public_names(file: SourceFile) -> set[str]:
    """What the module defines at its top level without a leading underscore."""
    names: set[str] = set()
    for node in file.tree.body:
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
                names.add(name)
            case ast.AsyncFunctionDef(name=name) | ast.AnnAssign(target=ast.Name(id=name)):
                names.add(name)
            case ast.Assign(targets=targets):
                names.update(target.id for target in targets if isinstance(target, ast.Name))
    return {name for name in names if not name.startswith("_")}


def banned_names(file: SourceFile) -> list[str]:
    found = []
    if BANNED_MODULE.search(file.module.rpartition(".")[2]):
        found.append(file.module)
    for node in ast.walk(file.tree):
        match node:
            case ast.ClassDef(name=name) if BANNED_CLASS.search(name):
                found.append(name)
            case ast.FunctionDef(name=name) | ast.arg(arg=name) | ast.Name(id=name) if (
                BANNED_NAME.search(name)
            ):
                found.append(name)
    return found


@pytest.mark.parametrize("module", PUBLIC)
def test_a_public_module_offers_exactly_these_names(module: str) -> None:
    (file,) = (file for file in source_files("cb_backend") if file.module == module)
    assert public_names(file) == PUBLIC[module]


@pytest.mark.parametrize("file", source_files(*ALL_FOLDERS), ids=str)
def test_a_name_says_what_the_thing_is(file: SourceFile) -> None:
    assert banned_names(file) == []


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("cb_backend/planted.py", "class CacheManager: ..."),
        ("cb_backend/planted.py", "class RequestHandler: ..."),
        ("cb_backend/planted.py", "def f():\n    class LogitsProcessor: ..."),
        ("cb_backend/planted.py", "class _TestHelper: ..."),
        ("cb_backend/planted.py", "class StringUtils: ..."),
        ("cb_backend/planted.py", "def f(uid): ..."),
        ("cb_backend/planted.py", "request_uid = 1"),
        ("cb_backend/core/utils.py", ""),
        ("cb_backend/core/block_helpers.py", ""),
    ],
)
def test_a_planted_name_is_found(path: str, text: str) -> None:
    assert len(banned_names(SourceFile(path, text))) == 1


def test_a_planted_public_name_is_found() -> None:
    text = "import os\nA = 1\nb: int = 2\n_c = 3\ndef d(): ...\nasync def e(): ...\nclass F: ..."
    assert public_names(SourceFile("cb_backend/planted.py", text)) == {"A", "b", "d", "e", "F"}
