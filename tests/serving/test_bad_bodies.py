"""Bodies that are no JSON, too deep or too long: refused, and a canary sings on."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from cb_backend import limits
from tests.serving.conftest import chat
from tests.serving.routes import CHAT
from tests.serving.test_bad_input import refused

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"'x'",
        b'{"messages": ',
        b'{"messages": [{"role": "user", "content": "hi"}]} more',
        b"\xff\xfe{}",
        b'{"prompt": "a", "prompt": "b"}',
        b'{"\\ud800": "a", "\\ud800": "b"}',
        b'{"messages": [{"role": "user", "content": "a\\ud83d b"}]}',
        b'{"messages": [{"role": "user", "content": "hi"}], "user": "\\udc00"}',
        b'{"messages": [{"role": "user", "content": "hi"}], "\\udc00": 1}',
        b'{"seed": ' + b"9" * 5000 + b"}",
        *(
            b'{"messages": [{"role": "user", "content": "hi"}], "temperature": ' + number + b"}"
            for number in (b"NaN", b"Infinity", b"-Infinity", b"1e309", b"-1e309")
        ),
    ],
)
async def test_a_broken_body_is_refused(http: httpx.AsyncClient, body: bytes) -> None:
    await refused(http, CHAT, body)


@pytest.mark.parametrize("depth", [limits.MAX_JSON_DEPTH, 500, 3_000, 20_000, 100_000])
@pytest.mark.parametrize("bracket", [(b"[", b"]"), (b'{"a":', b"}")])
async def test_deep_nesting_is_refused_without_recursion(
    http: httpx.AsyncClient, depth: int, bracket: tuple[bytes, bytes]
) -> None:
    nested = bracket[0] * depth + b"1" + bracket[1] * depth
    error = await refused(http, CHAT, b'{"metadata": ' + nested + b"}")
    assert str(limits.MAX_JSON_DEPTH) in error["message"]


async def test_a_body_past_its_cap_is_refused_with_413(http: httpx.AsyncClient) -> None:
    body = json.dumps(chat("x" * limits.MAX_BODY_BYTES)).encode()
    error = await refused(http, CHAT, body, status=413)
    assert str(limits.MAX_BODY_BYTES) in error["message"]

    async def without_a_declared_length() -> Any:
        for _ in range(limits.MAX_BODY_BYTES // 2**20 + 2):
            yield b" " * 2**20

    response = await http.post(CHAT, content=without_a_declared_length())
    assert response.status_code == 413


@pytest.mark.parametrize(
    "body",
    [
        chat(model="x" * 100_000),
        chat() | {"x" * 100_000: 1},
        {"messages": [{"role": ["x" * 100_000], "content": "hi"}]},
    ],
)
async def test_an_error_quotes_the_client_in_part_only(http: httpx.AsyncClient, body: Any) -> None:
    response = await http.post(CHAT, json=body)
    assert response.status_code in (400, 404)
    assert len(response.content) < 10_000
