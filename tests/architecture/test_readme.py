"""The README's configuration table is EngineConfig, field by field."""

from __future__ import annotations

import dataclasses
import re

from cb_backend.config import EngineConfig
from cb_backend.serving.settings import DEFAULT_MODEL
from tests.architecture.source import ROOT

README = (ROOT / "README.md").read_text()


def table(text: str) -> dict[str, tuple[str, str]]:
    """Field to (variable, default) of each row that starts with a field and its CB_ variable."""
    rows = re.findall(r"^\| `(\w+)` \| `(CB_\w+)` \| `?([^|`]*)`? \|", text, flags=re.MULTILINE)
    return {field: (variable, default.strip()) for field, variable, default in rows}


def expected() -> dict[str, tuple[str, str]]:
    rows = {}
    for field in dataclasses.fields(EngineConfig):
        default = DEFAULT_MODEL if field.name == "model" else field.default
        text = str(default).lower() if default not in (None, "") else "none"
        rows[field.name] = (f"CB_{field.name.upper()}", text)
    return rows


def test_the_table_lists_every_field_in_order_with_its_variable_and_default() -> None:
    assert list(table(README).items()) == list(expected().items())


def test_a_planted_row_is_read() -> None:
    text = "| `block_size` | `CB_BLOCK_SIZE` | none | tokens | |\n| `x` | not a row | 3 |\n"
    assert table(text) == {"block_size": ("CB_BLOCK_SIZE", "none")}
