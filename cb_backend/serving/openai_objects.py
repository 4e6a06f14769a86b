"""The JSON objects of OpenAI's answers, whole and in chunks. Plain functions.

Dictionaries rather than models: they are built once per token and request.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol
from uuid import uuid4

from cb_backend.core.step_io import ModelInfo
from cb_backend.serving.language_model import TextDelta

DONE = b"data: [DONE]\n\n"


def sse(data: dict[str, Any]) -> bytes:
    """One server-sent event, in ASCII: some clients split lines at Unicode's separators too."""
    return b"data: " + json.dumps(data, separators=(",", ":")).encode("ascii") + b"\n\n"


@dataclass(slots=True)
class Usage:
    """Counts over all choices of an answer."""

    prompt_tokens: int
    completion_tokens: dict[int, int] = field(default_factory=dict)  # by choice
    cached_tokens: dict[int, int] = field(default_factory=dict)

    def count(self, choice: int, delta: TextDelta) -> None:
        self.completion_tokens[choice] = delta.num_tokens
        self.cached_tokens[choice] = delta.num_cached_tokens

    def as_object(self) -> dict[str, Any]:
        completion = sum(self.completion_tokens.values())
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": self.prompt_tokens + completion,
            "prompt_tokens_details": {"cached_tokens": sum(self.cached_tokens.values())},
        }


class AnswerFormat(Protocol):
    """How one of the two routes writes an answer."""

    def opening(self) -> list[dict[str, Any]]:
        """Chunks that come before any text."""
        ...

    def chunk(self, choice: int, text: str, finish_reason: str | None) -> dict[str, Any]: ...

    def usage_chunk(self, usage: Usage) -> dict[str, Any]: ...

    def whole(self, choices: Sequence[tuple[str, str]], usage: Usage) -> dict[str, Any]:
        """`choices` are text and finish reason, in order."""
        ...


class ChatFormat:
    def __init__(self, model: str) -> None:
        self._head = _head("chatcmpl", model)

    def opening(self) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        return [self._chunk([{"index": 0, "delta": delta, "finish_reason": None}])]

    def chunk(self, choice: int, text: str, finish_reason: str | None) -> dict[str, Any]:
        delta = {"content": text} if text else {}
        return self._chunk([{"index": choice, "delta": delta, "finish_reason": finish_reason}])

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        return {**self._chunk([]), "usage": usage.as_object()}

    def whole(self, choices: Sequence[tuple[str, str]], usage: Usage) -> dict[str, Any]:
        return {
            **self._head,
            "object": "chat.completion",
            "choices": [
                {
                    "index": index,
                    "message": {"role": "assistant", "content": text, "refusal": None},
                    "logprobs": None,
                    "finish_reason": finish_reason,
                }
                for index, (text, finish_reason) in enumerate(choices)
            ],
            "usage": usage.as_object(),
        }

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head, "object": "chat.completion.chunk", "choices": choices}


class CompletionFormat:
    def __init__(self, model: str) -> None:
        self._head = {**_head("cmpl", model), "object": "text_completion"}

    def opening(self) -> list[dict[str, Any]]:
        return []

    def chunk(self, choice: int, text: str, finish_reason: str | None) -> dict[str, Any]:
        return {**self._head, "choices": [_completion_choice(choice, text, finish_reason)]}

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        return {**self._head, "choices": [], "usage": usage.as_object()}

    def whole(self, choices: Sequence[tuple[str, str]], usage: Usage) -> dict[str, Any]:
        return {
            **self._head,
            "choices": [
                _completion_choice(index, text, finish_reason)
                for index, (text, finish_reason) in enumerate(choices)
            ],
            "usage": usage.as_object(),
        }


def model_object(info: ModelInfo, created: int) -> dict[str, Any]:
    return {
        "id": info.model_name,
        "object": "model",
        "created": created,
        "owned_by": "cb_backend",
        "max_model_len": info.max_model_len,
    }


def _completion_choice(index: int, text: str, finish_reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}


def _head(prefix: str, model: str) -> dict[str, Any]:
    return {"id": f"{prefix}-{uuid4().hex}", "created": int(time.time()), "model": model}
