"""No code from data: nothing that unpickles, evaluates, or runs a model repository's own code."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.architecture.source import PRODUCT_FOLDERS, SourceFile, imports, source_files

MODULES = ("pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal")
CALLS = ("eval", "exec", "compile", "__import__")
ATTRIBUTES = (("torch", "load"), ("os", "system"))
# Each hands the text of its argument to a shell, or another repository's code to the interpreter.
KEYWORDS = ("trust_remote_code", "shell", "allow_pickle")


def dangers(file: SourceFile) -> Iterator[str]:
    for line, module in imports(file):
        if module.partition(".")[0] in MODULES or tuple(module.split(".")) in ATTRIBUTES:
            yield f"{file}:{line}: imports {module}"
    for node in ast.walk(file.tree):
        match node:
            case ast.Call(func=ast.Name(id=name)) if name in CALLS:
                yield f"{file}:{node.lineno}: calls {name}"
            case ast.Attribute(value=ast.Name(id=owner), attr=attr) if (owner, attr) in ATTRIBUTES:
                yield f"{file}:{node.lineno}: uses {owner}.{attr}"
            case ast.keyword(arg=str(name), value=value) if name in KEYWORDS:
                if not (isinstance(value, ast.Constant) and value.value is False):
                    yield f"{file}:{node.lineno}: passes {name} that is not False"


@pytest.mark.parametrize("file", source_files(*PRODUCT_FOLDERS), ids=str)
def test_a_file_runs_no_code_that_came_as_data(file: SourceFile) -> None:
    assert list(dangers(file)) == []


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "def f():\n    from dill import loads",
        "import cloudpickle as tidy",
        "eval('1')",
        "exec(text)",
        "torch.load(path)",
        "from torch import load",
        "load(name, trust_remote_code=True)",
        "load(name, trust_remote_code=flag)",
        "subprocess.run(command, shell=True)",
        "os.system(command)",
    ],
)
def test_a_planted_danger_is_found(text: str) -> None:
    assert len(list(dangers(SourceFile("cb_backend/planted.py", text)))) == 1


def test_a_refusal_of_remote_code_is_let_through() -> None:
    file = SourceFile("cb_backend/planted.py", "load(name, trust_remote_code=False)")
    assert list(dangers(file)) == []
