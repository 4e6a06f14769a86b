"""The end of a text that was cut off in the middle of a character, within `min_tokens`."""

from __future__ import annotations

from typing import Any, cast

from cb_backend.core.request import FinishReason
from cb_backend.core.step_io import TokenEvent
from cb_backend.serving.detokenizer import Detokenizer
from cb_backend.serving.language_model import _TextAssembly


class Bytes:
    def detokenizer(self) -> Detokenizer:
        return Detokenizer(lambda ids: bytes(ids).decode("utf-8", "replace"))


def test_no_stop_string_of_the_first_tokens_is_found_by_the_flush() -> None:
    """Two tokens, `min_tokens` of them: the length ended the text, not the stop string."""
    text = _TextAssembly(cast("Any", Bytes()), ["a\ufffd"], 2)
    event = TokenEvent("a", (97, 0xF0), 1, 0.0, 0, FinishReason.LENGTH, None, None)
    delta = text.add(event)
    assert (delta.text, delta.finish_reason) == ("a\ufffd", "length")
