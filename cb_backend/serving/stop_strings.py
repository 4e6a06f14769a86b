"""Finds stop strings in a text that comes in pieces, to the character. Plain state, any thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class StopStrings:
    """Holds back exactly the longest end of the text that may still become a stop string.

    The stop string that is complete first ends the text; what is before its start is the text. So
    the result does not depend on how the text was cut into pieces, and the cost is at most one
    automaton step per character and stop string.
    """

    __slots__ = ("_automata", "_first_characters", "_held")

    def __init__(self, stops: Sequence[str]) -> None:
        self._automata = [_Automaton(stop, _borders(stop)) for stop in stops]
        self._first_characters = {stop[0] for stop in stops}
        self._held = ""

    def feed(self, piece: str, *, may_end: bool = True) -> tuple[str, bool]:
        """The text that is now certain, and whether a stop string ended it. None that is complete
        in this piece does unless it `may_end`."""
        if not self._held and self._first_characters.isdisjoint(piece):
            return piece, False  # as nearly all: no stop string has begun, and none begins
        text = self._held + piece
        for end in range(len(self._held), len(text)):
            found = [a.stop for a in self._automata if a.advance(text[end])]
            if found and may_end:
                self._held = ""
                return text[: end + 1 - max(map(len, found))], True
        num_held = max(automaton.matched for automaton in self._automata)
        certain = len(text) - num_held
        self._held = text[certain:]
        return text[:certain], False

    def flush(self) -> str:
        """The generation is over: what was held back is text."""
        held, self._held = self._held, ""
        return held


@dataclass(slots=True)
class _Automaton:
    """Knuth, Morris and Pratt's: `matched` characters at the end of the text begin `stop`."""

    stop: str
    borders: list[int]
    matched: int = 0

    def advance(self, character: str) -> bool:
        while self.matched and self.stop[self.matched] != character:
            self.matched = self.borders[self.matched - 1]
        if self.stop[self.matched] == character:
            self.matched += 1
        if self.matched < len(self.stop):
            return False
        self.matched = self.borders[-1]  # where one was not to end the text, the next may overlap
        return True


def _borders(stop: str) -> list[int]:
    """For each prefix, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(stop)
    length = 0
    for index in range(1, len(stop)):
        while length and stop[length] != stop[index]:
            length = borders[length - 1]
        length += stop[length] == stop[index]
        borders[index] = length
    return borders
