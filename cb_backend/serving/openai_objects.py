"""The JSON of OpenAI's answers: whole ones as objects, chunks as server-sent events.

A chunk of text is put together from bytes, since it is made for each token of each stream.
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

# What follows `_chunk_start`: the one choice of a chunk, and the end of the event.
_CHAT_CHOICE = b'{"index":%d,"delta":{%b},"finish_reason":%b}]}\n\n'
_COMPLETION_CHOICE = b'{"index":%d,"text":%b,"logprobs":null,"finish_reason":%b}]}\n\n'


def sse(data: dict[str, Any]) -> bytes:
    """One server-sent event, in ASCII: some clients split lines at Unicode's separators too."""
    return b"data: " + json.dumps(data, separators=(",", ":")).encode("ascii") + b"\n\n"


@dataclass(slots=True)
class Usage:
    """Counts over all choices of an answer; `n` of them share a prompt."""

    prompt_tokens: int
    n: int = 1
    deltas: dict[int, TextDelta] = field(default_factory=dict)  # the last of each choice

    def count(self, choice: int, delta: TextDelta) -> None:
        self.deltas[choice] = delta

    def as_object(self) -> dict[str, Any]:
        completion = sum(delta.num_tokens for delta in self.deltas.values())
        costs = [delta.cost for delta in self.deltas.values() if delta.cost is not None]
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": self.prompt_tokens + completion,
            "prompt_tokens_details": {
                # As the prompt counts once, so does what was cached of it.
                "cached_tokens": sum(
                    delta.num_cached_tokens
                    for choice, delta in self.deltas.items()
                    if choice % self.n == 0
                )
            },
            "cb_cost": {
                "device_ms": round(1e3 * sum(cost.device_seconds for cost in costs), 3),
                "kv_block_seconds": round(sum(cost.kv_block_seconds for cost in costs), 6),
                # What choices share of a prompt counts here too.
                "tokens_saved": sum(delta.num_cached_tokens for delta in self.deltas.values()),
                "preemptions": sum(cost.num_preemptions for cost in costs),
            },
        }


class AnswerFormat(Protocol):
    """How one of the two routes writes an answer. Chunks are events, ready to be sent."""

    id: str

    def opening(self, choice: int) -> bytes:
        """What comes before any text of the choice."""
        ...

    def chunk(self, choice: int, text: str, finish_reason: str | None) -> bytes: ...

    def usage_chunk(self, usage: Usage) -> bytes: ...

    def whole(self, choices: Sequence[tuple[str, str]], usage: Usage) -> dict[str, Any]:
        """`choices` are text and finish reason, in order."""
        ...


class ChatFormat:
    def __init__(self, model: str, label: str = "") -> None:
        self.id = _answer_id("chatcmpl", label)
        self._head = _head(self.id, model)
        self._chunk_head = {**self._head, "object": "chat.completion.chunk"}
        self._chunk_start = _chunk_start(self._chunk_head)

    def opening(self, choice: int) -> bytes:
        return self._chunk(choice, b'"role":"assistant","content":""', None)

    def chunk(self, choice: int, text: str, finish_reason: str | None) -> bytes:
        return self._chunk(choice, b'"content":' + _quoted(text) if text else b"", finish_reason)

    def usage_chunk(self, usage: Usage) -> bytes:
        return sse({**self._chunk_head, "choices": [], "usage": usage.as_object()})

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

    def _chunk(self, choice: int, delta: bytes, finish_reason: str | None) -> bytes:
        reason = b"null" if finish_reason is None else _quoted(finish_reason)
        return self._chunk_start + _CHAT_CHOICE % (choice, delta, reason)


class CompletionFormat:
    def __init__(self, model: str, label: str = "") -> None:
        self.id = _answer_id("cmpl", label)
        self._head = {**_head(self.id, model), "object": "text_completion"}
        self._chunk_start = _chunk_start(self._head)

    def opening(self, choice: int) -> bytes:
        return b""

    def chunk(self, choice: int, text: str, finish_reason: str | None) -> bytes:
        reason = b"null" if finish_reason is None else _quoted(finish_reason)
        return self._chunk_start + _COMPLETION_CHOICE % (choice, _quoted(text), reason)

    def usage_chunk(self, usage: Usage) -> bytes:
        return sse({**self._head, "choices": [], "usage": usage.as_object()})

    def whole(self, choices: Sequence[tuple[str, str]], usage: Usage) -> dict[str, Any]:
        return {
            **self._head,
            "choices": [
                {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}
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


def _answer_id(prefix: str, label: str) -> str:
    """A client's own label, or one of ours. The engine's request ids begin with it."""
    return f"{prefix}-{label or uuid4().hex}"


def _head(answer_id: str, model: str) -> dict[str, Any]:
    return {"id": answer_id, "created": int(time.time()), "model": model}


def _chunk_start(head: dict[str, Any]) -> bytes:
    """An event up to where its choices begin: the same for all chunks of an answer."""
    return sse({**head, "choices": []}).removesuffix(b"]}\n\n")


def _quoted(text: str) -> bytes:
    return json.dumps(text).encode("ascii")
