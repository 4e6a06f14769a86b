"""Token ids to text, one at a time, without ever splitting a character. Plain state, any thread.

The text of a request is defined as what comes out here, streamed or not, so both are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"

# Tokens that are decoded again with each new one, since a decoder's output depends on what is
# around a token (leading spaces, the bytes of one character). More is slower and not more exact,
# except where a decoder lets bytes that are no character spoil whole ones before them.
_WINDOW_TOKENS = 6
# A character has at most 4 bytes, so more than this many tokens without a whole one are bytes
# that will never be one. Nor is more kept for the sake of a context that has text.
_MAX_HELD_TOKENS = 64


class Detokenizer:
    """`decode` gives the text of a list of ids; an unfinished character shows as U+FFFD at its end.

    Such an end is held back until the tokens that complete it have come, or `flush`.
    """

    __slots__ = ("_decode", "_num_context", "_num_given", "_window")

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._num_given = 0  # characters of the window's text that were given out
        self._num_context = 0  # leading tokens of the window whose text was given out

    def feed(self, token_id: int) -> str:
        """The text that is certain now; may be empty."""
        self._window.append(token_id)
        text = self._decode(self._window)
        if not text.endswith(REPLACEMENT):
            piece = text[self._num_given :]
            self._give(text)
            return piece
        if len(self._window) - self._num_context > _MAX_HELD_TOKENS:
            return self.flush()
        certain = text.rstrip(REPLACEMENT)
        piece = certain[self._num_given :]
        self._num_given = max(self._num_given, len(certain))
        return piece

    def flush(self) -> str:
        """What was held back, as it is: bytes that are no character stay U+FFFD."""
        piece = self._decode(self._window)[self._num_given :] if self._window else ""
        self._window, self._num_given, self._num_context = [], 0, 0
        return piece

    def _give(self, text: str) -> None:
        """All of the window's text is out: keep the last tokens as context for the next. Special
        tokens have no text, and after them alone a decoder would take it for the beginning."""
        self._num_given = len(text)
        if len(self._window) > _WINDOW_TOKENS:
            context = self._window[self._num_context :]
            num_given = len(self._decode(context))
            if num_given or len(self._window) > _MAX_HELD_TOKENS:
                self._window, self._num_given = context, num_given
        self._num_context = len(self._window)
