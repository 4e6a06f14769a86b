"""The project's own Python files, read as syntax trees. The architecture tests share it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PRODUCT_FOLDERS = ("cb_backend", "kernels")
ALL_FOLDERS = (*PRODUCT_FOLDERS, "tests", "benchmarks", "examples", "gpu_check")


@dataclass(frozen=True)
class SourceFile:
    """`path` is relative to the project; `module` is the name under which Python imports it."""

    path: str
    text: str

    @property
    def module(self) -> str:
        parts = Path(self.path.removeprefix("kernels/")).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, filename=self.path)

    def __str__(self) -> str:
        return self.path


def source_files(*folders: str) -> list[SourceFile]:
    paths = sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return [SourceFile(path.relative_to(ROOT).as_posix(), path.read_text()) for path in paths]


def imports(file: SourceFile) -> Iterator[tuple[int, str]]:
    """Line and absolute name of each import, those inside functions too.

    `from a import b` yields "a.b": b may be a module, and a prefix test for "a" still holds.
    """
    package = file.module if file.path.endswith("__init__.py") else file.module.rpartition(".")[0]
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def is_within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")
