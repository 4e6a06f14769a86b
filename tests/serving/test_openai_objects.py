"""Chunks, which are put together from bytes, are what JSON's own encoder would write."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cb_backend.core.request import RequestCost
from cb_backend.serving.language_model import TextDelta
from cb_backend.serving.openai_objects import ChatFormat, CompletionFormat, Usage, sse

MODEL = 'a "model" of 100%d\\'
TEXTS = [" fox", 'say "hi"\\', "line\nline\u2028line", "東京 🦊", "\ud800", "\x00\x1f\x7f", "%b"]


@pytest.mark.parametrize("text", [*TEXTS, ""])
@pytest.mark.parametrize("finish_reason", [None, "stop", "length"])
def test_a_chat_chunk_is_the_encoded_object(text: str, finish_reason: str | None) -> None:
    form = ChatFormat(MODEL, "label")
    delta = {"content": text} if text else {}
    choice = {"index": 12, "delta": delta, "finish_reason": finish_reason}
    assert form.chunk(12, text, finish_reason) == chat_chunk(form, choice)


def test_a_chat_choice_opens_with_its_role() -> None:
    form = ChatFormat(MODEL)
    delta = {"role": "assistant", "content": ""}
    assert form.opening(3) == chat_chunk(form, {"index": 3, "delta": delta, "finish_reason": None})


@pytest.mark.parametrize("text", [*TEXTS, ""])
@pytest.mark.parametrize("finish_reason", [None, "stop", "length"])
def test_a_completion_chunk_is_the_encoded_object(text: str, finish_reason: str | None) -> None:
    form = CompletionFormat(MODEL, "label")
    choice = {"index": 7, "text": text, "logprobs": None, "finish_reason": finish_reason}
    head = {"id": "cmpl-label", "created": created(form.chunk(7, "", None))}
    assert form.chunk(7, text, finish_reason) == sse(
        {**head, "model": MODEL, "object": "text_completion", "choices": [choice]}
    )


def test_usage_counts_what_each_choice_said_last() -> None:
    usage = Usage(prompt_tokens=20, n=2)
    for num_tokens in (1, 2, 5):
        usage.count(0, TextDelta("a", num_tokens, 16))
    usage.count(1, TextDelta("b", 3, 16, "length", RequestCost(0.25, 1.5, 2)))
    usage.count(0, TextDelta("", 6, 16, "stop", RequestCost(0.5, 2.0, 1)))
    assert usage.as_object() == {
        "prompt_tokens": 20,
        "completion_tokens": 9,
        "total_tokens": 29,
        "prompt_tokens_details": {"cached_tokens": 16},
        "cb_cost": {
            "device_ms": 750.0,
            "kv_block_seconds": 3.5,
            "tokens_saved": 32,
            "preemptions": 3,
        },
    }


def chat_chunk(form: ChatFormat, choice: dict[str, Any]) -> bytes:
    head = {"id": form.id, "created": created(form.chunk(0, "", None)), "model": MODEL}
    return sse({**head, "object": "chat.completion.chunk", "choices": [choice]})


def created(event: bytes) -> Any:
    return json.loads(event.removeprefix(b"data: "))["created"]
