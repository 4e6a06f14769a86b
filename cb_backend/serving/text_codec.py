"""Text to token ids and back, with the model's own tokenizer. Any thread.

What a client's length decides about runs in a thread: the asyncio loop is every client's.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cb_backend.errors import ModelError, PromptTooLongError
from cb_backend.serving.chat import Message, render_chat
from cb_backend.serving.detokenizer import Detokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Shorter texts cost less to tokenize than a thread costs to wake.
_INLINE_CHARS = 2048


class TextCodec:
    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        # The backend's own decode is five times as fast as the wrapper around it.
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        self._longest_token = max(map(len, tokenizer.get_vocab()), default=1)

    @classmethod
    def from_folder(cls, folder: Path) -> TextCodec:
        """Raises ModelError."""
        try:
            return cls(_load_tokenizer(folder))
        except (OSError, ValueError, KeyError) as error:
            raise ModelError(f"cannot read the tokenizer in {folder}: {error}") from error

    async def encode(
        self, text: str, *, max_tokens: int, add_special_tokens: bool = True
    ) -> list[int]:
        """The tokenizer's ids. Raises PromptTooLongError when there must be over `max_tokens`."""
        self._refuse_hopeless(text, max_tokens)
        if len(text) <= _INLINE_CHARS:
            return self._encode(text, add_special_tokens)
        return await asyncio.to_thread(self._encode, text, add_special_tokens)

    async def encode_chat(
        self, messages: Sequence[Message], *, max_tokens: int, add_generation_prompt: bool = True
    ) -> list[int]:
        """The conversation through the model's template, which brings its own special tokens."""
        # A template may repeat or drop text; a hopeless one is not even rendered.
        for message in messages:
            self._refuse_hopeless(str(message["content"]), max_tokens)

        def render_and_encode() -> list[int]:
            text = render_chat(
                self._tokenizer, messages, add_generation_prompt=add_generation_prompt
            )
            self._refuse_hopeless(text, max_tokens)
            return self._encode(text, False)

        return await asyncio.to_thread(render_and_encode)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Without special tokens, and without any cleaning of spaces."""
        if self._backend is not None:
            return str(self._backend.decode(token_ids, skip_special_tokens=True))
        text = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text

    def detokenizer(self) -> Detokenizer:
        return Detokenizer(self.decode)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        if self._backend is not None:
            # A batch of one, since only the batch call lets other threads run meanwhile.
            (encoding,) = self._backend.encode_batch_fast(
                [text], add_special_tokens=add_special_tokens
            )
            return list(encoding.ids)
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def _refuse_hopeless(self, text: str, max_tokens: int) -> None:
        """Megabytes of text would be tokenized only to count them."""
        at_least = len(text) // self._longest_token
        if at_least > max_tokens:
            raise PromptTooLongError(
                f"the prompt has at least {at_least} tokens ({len(text)} characters), but the"
                f" model's context holds {max_tokens} tokens; shorten it",
                field="prompt",
            )


def _load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    tokenizer: PreTrainedTokenizerBase
    if _names_generic_class(folder):
        # What AutoTokenizer would choose; without it torch is not imported (2.4 s and 300 MB
        # against 1.0 s and 120 MB).
        from transformers import PreTrainedTokenizerFast

        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    else:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return tokenizer


def _names_generic_class(folder: Path) -> bool:
    config = folder / "tokenizer_config.json"
    if not config.is_file() or not (folder / "tokenizer.json").is_file():
        return False
    return bool(json.loads(config.read_text()).get("tokenizer_class") == "TokenizersBackend")
