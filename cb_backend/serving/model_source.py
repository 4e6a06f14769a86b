"""Where a model's files are: what CB_MODEL may name, and its folder on this machine.

Runs in the supervisor before any worker starts, so that a wrong name fails at once, and again in
each worker, where the files are already there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import bentoml
from bentoml import Tag
from bentoml.exceptions import BentoMLException
from bentoml.models import BentoModel

from cb_backend.errors import ConfigError
from cb_backend.serving.settings import DEFAULT_MODEL

# What a model needs of a hub repository: no pickles, no code.
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.txt", "tokenizer.model"]
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_STORE_TAG = re.compile(r"[a-z0-9]([-._a-z0-9]*[a-z0-9])?(:[\w.-]+)?")


class SourceKind(StrEnum):
    FOLDER = "local folder"
    STORE = "BentoML store tag"
    HUB = "hub id"


@dataclass(frozen=True, slots=True)
class ModelSource:
    kind: SourceKind
    name: str

    @property
    def served_name(self) -> str:
        """The id clients use where the configuration gives none."""
        match self.kind:
            case SourceKind.FOLDER:
                return Path(self.name).expanduser().resolve().name
            case SourceKind.STORE:
                return self.name.partition(":")[0]
            case SourceKind.HUB:
                return self.name

    def pinned_to(self, tags: Iterable[Tag]) -> ModelSource:
        """Its version among `tags`, unless this source is no tag or has a version of its own."""
        name, _, version = self.name.partition(":")
        if self.kind is SourceKind.STORE and version in ("", "latest"):
            for tag in tags:
                if tag.name == name:
                    return ModelSource(SourceKind.STORE, str(tag))
        return self

    def folder(self) -> Path:
        """The model's folder, downloaded first where it must be. Raises ConfigError."""
        match self.kind:
            case SourceKind.FOLDER:
                folder = Path(self.name).expanduser().resolve()
            case SourceKind.STORE:
                folder = _store_folder(self.name)
            case SourceKind.HUB:
                folder = _hub_folder(self.name)
        if not (folder / "config.json").is_file():
            raise ConfigError(
                f"CB_MODEL={self.name} ({self.kind}): {folder} has no config.json, so it is no"
                " model in the Hugging Face layout",
                field="model",
            )
        return folder


class StoreModel(BentoModel):  # type: ignore[misc]  # BentoML's modules are untyped to mypy
    """BentoML's reference to a stored model, which says what to do where there is none."""

    def to_info(self, alias: str | None = None) -> Any:
        self._check()
        return super().to_info(alias)

    def resolve(self, base_path: Any = None) -> Any:
        self._check()
        return super().resolve(base_path)

    def _check(self) -> None:
        try:
            _store_folder(str(self.tag))
        except ConfigError as error:
            raise BentoMLException(error.message) from error


def model_source(name: str) -> ModelSource:
    """A folder that exists, else what the name's form says. Raises ConfigError."""
    looks_like_path = name.startswith(("/", ".", "~"))
    if Path(name).expanduser().is_dir():
        return ModelSource(SourceKind.FOLDER, name)
    if looks_like_path:
        raise ConfigError(f"CB_MODEL={name}: there is no such folder", field="model")
    if _STORE_TAG.fullmatch(name):
        return ModelSource(SourceKind.STORE, name)
    if _HUB_ID.fullmatch(name):
        return ModelSource(SourceKind.HUB, name)
    raise ConfigError(
        f"CB_MODEL={name} is neither an existing folder, nor a store tag (name or name:version),"
        " nor a hub id (owner/name)",
        field="model",
    )


def _store_folder(tag: str) -> Path:
    try:
        return Path(bentoml.models.get(tag).path)
    except BentoMLException as error:
        remedy = (
            "run `make model` to put the default model there"
            if tag.partition(":")[0] == DEFAULT_MODEL.partition(":")[0]
            else "see `bentoml models list`; a local folder is given with its path"
        )
        raise ConfigError(
            f"CB_MODEL={tag}: no such model in the BentoML store; {remedy}", field="model"
        ) from error


def _hub_folder(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(hub_id, allow_patterns=_HUB_FILES, local_files_only=True))
    except LocalEntryNotFoundError:
        pass  # not on this machine yet
    try:
        return Path(snapshot_download(hub_id, allow_patterns=_HUB_FILES))
    except Exception as error:  # the hub's client raises its own, requests' and the system's
        raise ConfigError(
            f"CB_MODEL={hub_id}: not a local folder, and the hub does not give it"
            f" ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''});"
            " check the name and the network, or give a local folder",
            field="model",
        ) from error
