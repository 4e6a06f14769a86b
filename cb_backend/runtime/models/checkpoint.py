"""Reads a safetensors checkpoint one tensor at a time, so that no second copy of it exists."""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from cb_backend.errors import ModelError

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


class Checkpoint:
    """The tensors of a model folder by name. A context manager; files are mapped, not read.

    Raises ModelError when there are no safetensors weights, or one is missing or broken.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file_of: dict[str, str] = {}  # tensor name -> file name
        self._open_files: dict[str, Any] = {}
        self.unread: set[str] = set()  # names nobody asked for yet
        if (folder / _INDEX).is_file():
            self._file_of = _read_index(folder / _INDEX)
        elif (folder / _SINGLE).is_file():
            self._file_of = dict.fromkeys(self._file(_SINGLE).keys(), _SINGLE)
        else:
            raise ModelError(
                f"no safetensors weights in {folder}: neither {_SINGLE} nor {_INDEX} exists;"
                " save the model with safetensors (other formats can run code and are refused)"
            )
        self.unread.update(self._file_of)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._open_files.clear()

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def tensor(self, name: str) -> Tensor:
        """The tensor on the CPU, in the dtype it is stored in."""
        if name not in self._file_of:
            raise ModelError(f"the weights in {self._folder} lack {name!r}")
        self.unread.discard(name)
        try:
            tensor: Tensor = self._file(self._file_of[name]).get_tensor(name)
        except SafetensorError as error:
            raise ModelError(f"cannot read {name!r} from {self._folder}: {error}") from error
        return tensor

    def shape(self, name: str) -> tuple[int, ...]:
        """Without reading the tensor's data."""
        return tuple(self._file(self._file_of[name]).get_slice(name).get_shape())

    def _file(self, file_name: str) -> Any:
        if file_name not in self._open_files:
            path = self._folder / file_name
            try:
                self._open_files[file_name] = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ModelError(f"cannot read {path}: {error}") from error
        return self._open_files[file_name]


def _read_index(path: Path) -> dict[str, str]:
    try:
        weight_map: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError) as error:
        raise ModelError(f"{path} is not a safetensors index: {error!r}") from error
    for file_name in set(weight_map.values()):
        if not (path.parent / file_name).is_file():
            raise ModelError(f"{path} names {file_name}, which does not exist")
    return weight_map
