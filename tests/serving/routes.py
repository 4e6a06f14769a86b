"""The OpenAI routes as a test calls them."""

from __future__ import annotations

from typing import Any

import httpx

from tests.serving.conftest import (
    sse_objects,
)

CHAT = "/v1/chat/completions"


COMPLETIONS = "/v1/completions"


async def stream_of(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[Any]:
    response = await http.post(path, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return sse_objects(response.text)


def text_of(events: list[Any]) -> str:
    choices = [choice for event in events for choice in event["choices"]]
    return "".join(c.get("text") or c.get("delta", {}).get("content") or "" for c in choices)


async def whole(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Any:
    response = await http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()
