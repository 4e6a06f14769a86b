"""No file, function or class grows past what a reader holds in mind, unless the list says why."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.architecture.source import ALL_FOLDERS, PRODUCT_FOLDERS, SourceFile, source_files

MAX_FILE_LINES = 300
MAX_FUNCTION_LINES = 50
MAX_CLASS_METHODS = 15

# What is too large, and why it stays so. An entry that is no longer needed fails a test.
ALLOWED: dict[str, str] = {
    "kernels/cb_kernels/triton/attention_kernel.py:_attend": (
        "straight down: what a program derives from its place in the grid; each part of it would"
        " take most of the arguments"
    ),
}


def oversized(file: SourceFile) -> Iterator[tuple[str, str]]:
    """The name of each thing that is too large, and its size in words."""
    num_lines = len(file.text.splitlines())
    if num_lines > MAX_FILE_LINES:
        yield file.path, f"{num_lines} lines, at most {MAX_FILE_LINES}"
    for node in ast.walk(file.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            num_lines = node.end_lineno - _first_line(node) + 1
            if num_lines > MAX_FUNCTION_LINES:
                yield f"{file}:{node.name}", f"{num_lines} lines, at most {MAX_FUNCTION_LINES}"
        elif isinstance(node, ast.ClassDef):
            num_methods = sum(
                isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) for child in node.body
            )
            if num_methods > MAX_CLASS_METHODS:
                yield f"{file}:{node.name}", f"{num_methods} methods, at most {MAX_CLASS_METHODS}"


def _first_line(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Of a Triton kernel, that of its body: its arguments stand one a line, each with its shape."""
    is_kernel = any(ast.unparse(node).startswith("triton.jit") for node in function.decorator_list)
    return function.body[0].lineno if is_kernel else function.lineno


@pytest.mark.parametrize("file", source_files(*PRODUCT_FOLDERS), ids=str)
def test_a_file_and_what_is_in_it_stay_small(file: SourceFile) -> None:
    assert {name: size for name, size in oversized(file) if name not in ALLOWED} == {}


@pytest.mark.parametrize("file", source_files(*ALL_FOLDERS), ids=str)
def test_no_file_is_long(file: SourceFile) -> None:
    assert len(file.text.splitlines()) <= MAX_FILE_LINES


def test_every_exception_is_still_needed_and_has_a_reason() -> None:
    found = {name for file in source_files(*PRODUCT_FOLDERS) for name, _ in oversized(file)}
    assert set(ALLOWED) <= found
    assert all(reason.strip() for reason in ALLOWED.values())


def _lines(num_lines: int) -> str:
    return "x = 1\n" * num_lines


def _function(num_lines: int) -> str:
    return "def long():\n" + "    x = 1\n" * (num_lines - 1)


def _kernel(num_lines: int) -> str:
    return "@triton.jit\ndef long(\n" + "    a,\n" * 9 + "):\n" + "    x = 1\n" * num_lines


def _class(num_methods: int) -> str:
    return "class Big:\n" + "".join(f"    def m{i}(self): ...\n" for i in range(num_methods))


@pytest.mark.parametrize(
    ("at_the_limit", "past_it", "name"),
    [
        (_lines(300), _lines(301), "cb_backend/planted.py"),
        (_function(50), _function(51), "cb_backend/planted.py:long"),
        (_function(50), _function(51).replace("def", "async def"), "cb_backend/planted.py:long"),
        (_kernel(50), _kernel(51), "cb_backend/planted.py:long"),
        (_class(15), _class(16), "cb_backend/planted.py:Big"),
    ],
    ids=["file", "function", "async function", "kernel", "class"],
)
def test_a_planted_giant_is_found(at_the_limit: str, past_it: str, name: str) -> None:
    assert list(oversized(SourceFile("cb_backend/planted.py", at_the_limit))) == []
    assert [found for found, _ in oversized(SourceFile("cb_backend/planted.py", past_it))] == [name]
