"""What is declared, what is pinned, what a Bento installs and what is imported agree."""

from __future__ import annotations

import importlib.metadata
import re
import sys
import tomllib
from collections.abc import Iterable

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.architecture.source import PRODUCT_FOLDERS, ROOT, imports, source_files

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
DECLARED = [*PROJECT["dependencies"], *EXTRAS["default-model"], *EXTRAS["dev"], *EXTRAS["plan"]]

# Imported, yet no dependency of its own: a dependency always brings it, in a version that fits.
BROUGHT_ALONG = {
    "huggingface_hub": "transformers",
    "tokenizers": "transformers",
    "triton": "torch",  # where there is a GPU
}

# A torch built for CUDA brings these in the versions it was built with.
CUDA_BUILD = ("nvidia-cu", "nvidia-nccl", "nvidia-nv", "cuda-", "triton")


def pins(text: str) -> dict[str, str]:
    """Canonical name to version; raises ValueError unless each line is exactly `name==version`."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        match = re.fullmatch(r"([A-Za-z0-9._-]+)==([A-Za-z0-9.!]+)", line)
        if match is None:
            raise ValueError(f"{line!r} is not name==version")
        found[canonicalize_name(match[1])] = match[2]
    return found


PINS = pins((ROOT / "constraints.txt").read_text())


def unsatisfied(requirements: Iterable[str], pinned: dict[str, str]) -> list[str]:
    """The requirements that no pin answers."""
    return [
        text
        for text in requirements
        if (requirement := Requirement(text))
        and pinned.get(canonicalize_name(requirement.name), "") not in requirement.specifier
    ]


def closure(requirements: Iterable[str]) -> set[str]:
    """Canonical names of the requirements and all that they need, without a CUDA torch's own."""
    found: set[str] = set()
    todo = [Requirement(text) for text in requirements]
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        extras = requirement.extras or {""}
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        if (name in found and not requirement.extras) or name.startswith(CUDA_BUILD):
            continue
        found.add(name)
        for text in importlib.metadata.requires(name) or []:
            needed = Requirement(text)
            if not needed.marker or any(needed.marker.evaluate({"extra": e}) for e in extras):
                needed.marker = None
                todo.append(needed)
    return found


def test_every_declared_dependency_is_pinned_to_a_version_it_allows() -> None:
    assert unsatisfied(DECLARED, PINS) == []


def test_everything_that_a_dependency_needs_is_pinned() -> None:
    assert closure(DECLARED) - set(PINS) == set()


def test_a_bento_installs_exactly_what_the_backend_needs_at_the_pinned_versions() -> None:
    bento = yaml.safe_load((ROOT / "bentofile.yaml").read_text())
    installed = pins("\n".join(bento["python"]["packages"]))
    assert set(installed) == closure(PROJECT["dependencies"])
    assert installed == {name: PINS[name] for name in installed}


def test_everything_imported_is_declared() -> None:
    declared = {canonicalize_name(Requirement(text).name) for text in DECLARED}
    imported = {
        module.partition(".")[0]
        for file in source_files(*PRODUCT_FOLDERS)
        for _, module in imports(file)
    }
    third_party = imported - sys.stdlib_module_names - {"cb_backend", "cb_kernels"}
    assert {
        name
        for name in third_party
        if canonicalize_name(BROUGHT_ALONG.get(name, name)) not in declared
    } == set()


def test_the_changelog_opens_with_the_packaged_version() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text()
    versions = re.findall(r"^## \[(\d[^\]]*)\]", changelog, flags=re.MULTILINE)
    assert versions[0] == PROJECT["version"]


def test_a_missing_or_misfit_pin_is_found() -> None:
    pinned = {"present": "2.0", "old": "1.0"}
    assert unsatisfied(["present>=1", "old>=2", "absent>=1"], pinned) == ["old>=2", "absent>=1"]


@pytest.mark.parametrize("line", ["name", "name>=1", "name==1 # why", "name @ file:///x", "-e ."])
def test_a_line_that_is_no_pin_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match="is not name==version"):
        pins(line)
