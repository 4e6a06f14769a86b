"""A request body as checked JSON: bounded, strict, and refused with the reason. Asyncio loop."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from starlette.requests import ClientDisconnect, Request

from cb_backend import limits
from cb_backend.errors import InvalidRequestError
from cb_backend.serving.client_watch import ClientLeftError

# A larger body is parsed in a thread: what parses in about a millisecond may stay on the loop.
_INLINE_BYTES = 64 * 1024


class BodyTooLargeError(InvalidRequestError):
    code = "body_too_large"


async def read_json_object(request: Request) -> dict[str, Any]:
    """Raises InvalidRequestError; BodyTooLargeError as soon as the body passes its cap."""
    body = await _read(request)
    if len(body) > _INLINE_BYTES:
        parsed = await asyncio.to_thread(parse_json, body)
    else:
        parsed = parse_json(body)
    if not isinstance(parsed, dict):
        raise InvalidRequestError("the body must be a JSON object")
    return parsed


def parse_json(body: bytes) -> Any:
    """JSON without NaN, Infinity, double keys, deep nesting or broken Unicode."""
    try:
        parsed = json.loads(
            body.decode("utf-8"),
            parse_constant=_refuse_constant,
            object_pairs_hook=_object_without_double_keys,
        )
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"the body is not UTF-8: byte {error.start} is wrong") from None
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:  # broken JSON, or a number of thousands of digits
        raise InvalidRequestError(f"the body is not valid JSON: {error}") from None
    _check_tree(parsed)
    return parsed


async def _read(request: Request) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limits.MAX_BODY_BYTES:
        raise _too_large(declared)
    chunks: list[bytes] = []
    size = 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size > limits.MAX_BODY_BYTES:
                raise _too_large(f"more than {limits.MAX_BODY_BYTES}")
            chunks.append(chunk)
    except ClientDisconnect:
        raise ClientLeftError from None
    return b"".join(chunks)


def _refuse_constant(name: str) -> None:
    raise InvalidRequestError(f"the body is not valid JSON: {name} is no JSON number")


def _object_without_double_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise InvalidRequestError(f"the body has the key {key!r} twice", field=key)
            seen.add(key)
    return result


def _check_tree(root: Any) -> None:
    """No recursion: the depth is the client's. Lone surrogates would fail later, when encoded."""
    level = [root]
    depth = 0
    while level:
        depth += 1
        if depth > limits.MAX_JSON_DEPTH:
            raise _too_deep()
        deeper: list[Any] = []
        for node in level:
            if isinstance(node, dict):
                for key, value in node.items():
                    _check_text(key)
                    _visit(value, deeper)
            elif isinstance(node, list):
                for value in node:
                    _visit(value, deeper)
            else:
                _visit(node, deeper)
        level = deeper


def _visit(value: Any, deeper: list[Any]) -> None:
    if isinstance(value, str):
        _check_text(value)
    elif isinstance(value, (dict, list)):
        deeper.append(value)


def _check_text(text: str) -> None:
    if text.isascii():
        return
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"the body has half of a surrogate pair, \\u{ord(text[error.start]):04x}, on its own"
        ) from None


def _too_deep() -> InvalidRequestError:
    return InvalidRequestError(
        f"the body nests deeper than {limits.MAX_JSON_DEPTH} arrays and objects"
    )


def _too_large(size: str) -> BodyTooLargeError:
    return BodyTooLargeError(f"the body may have at most {limits.MAX_BODY_BYTES} bytes, got {size}")
