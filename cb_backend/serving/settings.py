"""The environment's CB_* variables as an EngineConfig. Read once, when the services are imported.

Nothing below this module reads the environment.
"""

from __future__ import annotations

import dataclasses
import os
import types
from collections.abc import Callable, Mapping
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from cb_backend.config import EngineConfig
from cb_backend.errors import ConfigError

PREFIX = "CB_"
DEFAULT_MODEL = "smollm2-135m-instruct:latest"  # a tag of the BentoML model store

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")


def config_from_env(environ: Mapping[str, str] = os.environ) -> EngineConfig:
    """Raises ConfigError naming the variable. `model` is still a folder, a tag or a hub id."""
    hints = get_type_hints(EngineConfig)
    fields = {PREFIX + field.name.upper(): field.name for field in dataclasses.fields(EngineConfig)}
    values: dict[str, Any] = {"model": DEFAULT_MODEL}
    for variable in sorted(name for name in environ if name.startswith(PREFIX)):
        if variable not in fields:
            raise ConfigError(
                f"unknown setting {variable}; the settings are {', '.join(sorted(fields))}"
            )
        text = environ[variable].strip()
        if text:  # an empty variable is an unset one, as in `CB_MODEL= make serve`
            values[fields[variable]] = _parse(variable, text, hints[fields[variable]])
    try:
        return EngineConfig(**values)
    except ConfigError as error:
        name = PREFIX + (error.field or "").upper()
        raise ConfigError(f"{name}: {error.message}", field=error.field) from None


def _parse(variable: str, text: str, hint: Any) -> object:
    if get_origin(hint) in (Union, types.UnionType):
        (hint,) = (arg for arg in get_args(hint) if arg is not type(None))
    if get_origin(hint) is Literal or hint is str:
        return text
    parse, kind = _PARSERS[get_origin(hint) or hint]
    try:
        return parse(text)
    except ValueError:
        raise ConfigError(f"{variable} must be {kind}, got {text!r}") from None


def _parse_bool(text: str) -> bool:
    if text.lower() in _TRUE:
        return True
    if text.lower() in _FALSE:
        return False
    raise ValueError(text)


def _parse_numbers(text: str) -> dict[str, float]:
    pairs = (part.partition("=") for part in text.split(","))
    return {name.strip(): float(number) for name, _, number in pairs}


_PARSERS: dict[Any, tuple[Callable[[str], object], str]] = {
    int: (int, "an integer"),
    float: (float, "a number"),
    Mapping: (_parse_numbers, "name=number pairs with commas between them"),
    bool: (_parse_bool, "one of " + ", ".join((*_TRUE, *_FALSE))),
}
