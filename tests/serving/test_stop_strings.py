from __future__ import annotations

import random

import pytest

from cb_backend.serving.stop_strings import StopStrings


def run(stops: list[str], pieces: list[str]) -> tuple[str, bool, list[str]]:
    matcher = StopStrings(stops)
    given: list[str] = []
    for piece in pieces:
        text, found = matcher.feed(piece)
        given.append(text)
        if found:
            return "".join(given), True, given
    given.append(matcher.flush())
    return "".join(given), False, given


def oracle(stops: list[str], text: str) -> tuple[str, bool]:
    """Character by character: the stop that is complete first, the longest of those."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))], True
    return text, False


@pytest.mark.parametrize(
    ("stops", "pieces", "text", "found"),
    [
        (["END"], ["say EN", "D now"], "say ", True),
        (["END"], ["E", "N", "D"], "", True),
        (["END"], ["say EN"], "say EN", False),
        (["abc", "b"], ["xabc"], "xa", True),
        (["aab"], ["aaab"], "a", True),
        (["abab"], ["abaabab!"], "aba", True),
        (["bc", "abc"], ["abc"], "", True),
        (["ß"], ["straße"], "stra", True),
        ([], ["anything"], "anything", False),
    ],
)
def test_the_text_ends_at_the_first_character_of_the_stop(
    stops: list[str], pieces: list[str], text: str, found: bool
) -> None:
    assert run(stops, pieces)[:2] == (text, found)


def test_only_a_proper_beginning_of_a_stop_is_held_back() -> None:
    _, _, given = run(["QQQQQQQQ", "over"], ["the ", "fox jumps o", "n"])
    assert given == ["the ", "fox jumps ", "on", ""]


def test_what_was_held_back_comes_at_the_end() -> None:
    _, _, given = run(["fox!"], ["the fo", "x"])
    assert given == ["the ", "", "fox"]


def test_the_result_does_not_depend_on_how_the_text_is_cut() -> None:
    rng = random.Random(7)
    for _ in range(3000):
        text = "".join(rng.choice("ab") for _ in range(rng.randint(0, 14)))
        stops = [
            "".join(rng.choice("ab") for _ in range(rng.randint(1, 4)))
            for _ in range(rng.randint(1, 3))
        ]
        pieces, rest = [], text
        while rest:
            size = rng.randint(1, len(rest))
            pieces.append(rest[:size])
            rest = rest[size:]
        assert run(stops, pieces)[:2] == oracle(stops, text), (stops, pieces)


@pytest.mark.parametrize(
    ("early", "late", "text"),
    [
        ("xENDx", "yENDz", "xENDxy"),
        ("xEN", "Dy", "x"),  # complete where it may end the text
        ("xEND", "END", "xEND"),
        ("aba", "ba", "ab"),  # the second one begins within the first
    ],
)
def test_a_stop_that_is_complete_too_early_is_text(early: str, late: str, text: str) -> None:
    matcher = StopStrings(["aba" if early == "aba" else "END"])
    first, ended = matcher.feed(early, may_end=False)
    assert not ended
    second, ended = matcher.feed(late)
    assert (first + second, ended) == (text, True)
