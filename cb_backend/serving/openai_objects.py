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

from cb_backend.core.request import RequestCost
from cb_backend.core.step_io import ModelInfo
from cb_backend.serving.language_model import TextDelta

DONE = b"data: [DONE]\n\n"


def sse(data: dict[str, Any]) -> bytes:
    """One server-sent event, in ASCII: some clients split lines at Unicode's separators too."""
    return b"data: " + json.dumps(data, separators=(",", ":")).encode("ascii") + b"\n\n"


@dataclass(slots=True)
class Usage:
    """Counts over all choices of an answer; `n` of them share a prompt."""

    prompt_tokens: int
    n: int = 1
    completion_tokens: dict[int, int] = field(default_factory=dict)  # by choice
    cached_tokens: dict[int, int] = field(default_factory=dict)
    costs: list[RequestCost] = field(default_factory=list)

    def count(self, choice: int, delta: TextDelta) -> None:
        self.completion_tokens[choice] = delta.num_tokens
        self.cached_tokens[choice] = delta.num_cached_tokens
        if delta.cost is not None:
            self.costs.append(delta.cost)

    def as_object(self) -> dict[str, Any]:
        completion = sum(self.completion_tokens.values())
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": self.prompt_tokens + completion,
            "prompt_tokens_details": {
                # As the prompt counts once, so does what was cached of it.
                "cached_tokens": sum(
                    cached for choice, cached in self.cached_tokens.items() if choice % self.n == 0
                )
            },
            "cb_cost": {
                "device_ms": round(1e3 * sum(cost.device_seconds for cost in self.costs), 3),
                "kv_block_seconds": round(sum(cost.kv_block_seconds for cost in self.costs), 6),
                # What choices share of a prompt counts here too.
                "tokens_saved": sum(self.cached_tokens.values()),
                "preemptions": sum(cost.num_preemptions for cost in self.costs),
            },
        }


class AnswerFormat(Protocol):
    """How one of the two routes writes an answer."""

    id: str

    def opening(self, choice: int) -> list[dict[str, Any]]:
        """Chunks that come before any text of the choice."""
        ...

    def chunk(self, choice: int, text: str, finish_reason: str | None) -> dict[str, Any]: ...

    def usage_chunk(self, usage: Usage) -> dict[str, Any]: ...

    def whole(self, choices: Sequence[tuple[str, str]], usage: Usage) -> dict[str, Any]:
        """`choices` are text and finish reason, in order."""
        ...


class ChatFormat:
    def __init__(self, model: str, label: str = "") -> None:
        self.id = _answer_id("chatcmpl", label)
        self._head = _head(self.id, model)

    def opening(self, choice: int) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        return [self._chunk([{"index": choice, "delta": delta, "finish_reason": None}])]

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
    def __init__(self, model: str, label: str = "") -> None:
        self.id = _answer_id("cmpl", label)
        self._head = {**_head(self.id, model), "object": "text_completion"}

    def opening(self, choice: int) -> list[dict[str, Any]]:
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


def _answer_id(prefix: str, label: str) -> str:
    """A client's own label, or one of ours. The engine's request ids begin with it."""
    return f"{prefix}-{label or uuid4().hex}"


def _head(answer_id: str, model: str) -> dict[str, Any]:
    return {"id": answer_id, "created": int(time.time()), "model": model}
