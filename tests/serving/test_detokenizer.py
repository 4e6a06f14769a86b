from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from cb_backend.serving.detokenizer import REPLACEMENT, Detokenizer
from cb_backend.serving.text_codec import TextCodec
from tests.serving.conftest import Script

TEXTS = [
    "the quick brown fox",
    "客单价 and 👩‍👩‍👧 ď",
    "é́ combining, עברית, ไทย",
    "",
    " leading and trailing  ",
    "tabs\tand\nlines\r\n",
    "🇩🇪🇫🇷" * 10,
]


def pieces_of(codec: TextCodec, token_ids: Sequence[int]) -> list[str]:
    detokenizer = codec.detokenizer()
    return [*(detokenizer.feed(token_id) for token_id in token_ids), detokenizer.flush()]


@pytest.mark.parametrize("text", TEXTS)
def test_the_pieces_add_up_to_the_text_and_none_splits_a_character(
    codec: TextCodec, tokenizer: PreTrainedTokenizerFast, text: str
) -> None:
    pieces = pieces_of(codec, tokenizer.encode(text, add_special_tokens=False))
    assert "".join(pieces) == text
    assert not any(REPLACEMENT in piece for piece in pieces)


def test_a_character_comes_with_its_last_byte(codec: TextCodec, script: Script) -> None:
    assert pieces_of(codec, script.bytes_of("a😀b".encode())) == ["a", "", "", "", "😀", "b", ""]


@pytest.mark.parametrize("data", [b"\xf0", b"\xf0\x9f", b"ab\xe5\xae", b"\x80\x80x\xff", b"\xc3("])
def test_bytes_that_are_no_character_become_the_replacement_character(
    codec: TextCodec, script: Script, data: bytes
) -> None:
    assert "".join(pieces_of(codec, script.bytes_of(data))) == data.decode(errors="replace")


def test_random_bytes_decode_as_they_do_all_at_once(codec: TextCodec, script: Script) -> None:
    rng = random.Random(3)
    for _ in range(300):
        characters = "".join(rng.choice("aé客😀 ") for _ in range(rng.randint(0, 30))).encode()
        data = bytes(rng.choice(characters) for _ in range(rng.randint(0, 20)) if characters)
        token_ids = script.bytes_of(characters + data + characters)
        assert "".join(pieces_of(codec, token_ids)) == codec.decode(token_ids)


def test_endless_rubbish_is_given_out_in_bounded_pieces(codec: TextCodec, script: Script) -> None:
    pieces = pieces_of(codec, script.bytes_of(b"\x80" * 1000))
    assert "".join(pieces) == REPLACEMENT * 1000
    assert max(map(len, pieces)) < 100


def test_the_work_per_token_does_not_grow_with_the_text(codec: TextCodec, script: Script) -> None:
    decoded = 0

    def counting_decode(token_ids: Sequence[int]) -> str:
        nonlocal decoded
        decoded += len(token_ids)
        return codec.decode(token_ids)

    detokenizer = Detokenizer(counting_decode)
    token_ids = script.bytes_of("the fox 客 😀 ".encode() * 200)
    for token_id in token_ids:
        detokenizer.feed(token_id)
    assert decoded < 24 * len(token_ids)


def test_special_tokens_are_not_text(codec: TextCodec, script: Script) -> None:
    token_ids = [*script.bytes_of(b"ab"), script.id_of("<|end|>"), *script.bytes_of(b"cd")]
    assert "".join(pieces_of(codec, token_ids)) == "abcd"


@pytest.fixture
def sentencepiece() -> TextCodec:
    """Its way: a word's space belongs to it, and unknown characters are byte tokens."""
    vocabulary = {"<unk>": 0, "▁the": 1, "▁fox": 2, "es": 3}
    vocabulary |= {f"<0x{byte:02X}>": 4 + byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<tool>"])  # behind the bytes
    return TextCodec(PreTrainedTokenizerFast(tokenizer_object=tokenizer))


def test_a_decoder_that_strips_the_first_space_keeps_the_others(sentencepiece: TextCodec) -> None:
    euro = [4 + byte for byte in "€😀".encode()]
    pieces = pieces_of(sentencepiece, [1, 2, 3, *euro, 2] * 20)
    assert "".join(pieces) == ("the foxes€😀 fox" + " the foxes€😀 fox" * 19)
    assert not any(REPLACEMENT in piece for piece in pieces)


@pytest.mark.parametrize("words", range(1, 20))
def test_a_special_token_between_two_words_takes_no_space_away(
    sentencepiece: TextCodec, words: int
) -> None:
    special = 4 + 256
    pieces = pieces_of(sentencepiece, [*[1] * words, special, special, 2])
    assert "".join(pieces) == "the " * words + "fox"


def test_special_tokens_without_end_are_not_kept(codec: TextCodec, script: Script) -> None:
    longest = 0

    def watching_decode(token_ids: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(token_ids))
        return codec.decode(token_ids)

    detokenizer = Detokenizer(watching_decode)
    for _ in range(500):
        detokenizer.feed(script.id_of("<|end|>"))
    assert longest < 100
