"""Errors as HTTP answers in OpenAI's form. The one place that knows statuses."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from cb_backend import limits
from cb_backend.errors import (
    CBError,
    DeadlineError,
    EngineUnavailableError,
    InvalidRequestError,
    OverloadedError,
)
from cb_backend.serving.client_watch import ClientLeftError
from cb_backend.serving.json_body import BodyTooLargeError

_logger = logging.getLogger(__name__)

_RETRY_AFTER_S = {429: "1", 503: "5"}
_CLIENT_CLOSED_REQUEST = 499


class ModelNotFoundError(InvalidRequestError):
    code = "model_not_found"


class RequestNotFoundError(InvalidRequestError):
    code = "request_not_found"


class AdminKeyError(InvalidRequestError):
    code = "invalid_admin_key"


class AdminDisabledError(InvalidRequestError):
    code = "admin_disabled"


def status_of(error: CBError) -> int:
    match error:
        case AdminKeyError():
            return 401
        case AdminDisabledError():
            return 403
        case ModelNotFoundError() | RequestNotFoundError():
            return 404
        case BodyTooLargeError():
            return 413
        case InvalidRequestError():
            return 400
        # A deadline is out of reach because of what is ahead: less load or more time, and it is
        # served. 504 would say that the time has passed, and that computing it was tried.
        case OverloadedError() | DeadlineError():
            return 429
        case EngineUnavailableError():
            return 503
        case _:
            return 500


def error_body(error: CBError) -> dict[str, Any]:
    return _body(error.message, status_of(error), param=error.field, code=error.code)


def error_response(error: CBError) -> Response:
    status = status_of(error)
    headers: dict[str, str] = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(math.ceil(error.retry_after_s))
    elif status in _RETRY_AFTER_S:
        headers["retry-after"] = _RETRY_AFTER_S[status]
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    return _response(error_body(error), status, headers)


async def on_cb_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, CBError)
    return error_response(error)


async def on_client_left(request: Request, error: Exception) -> Response:
    return Response(status_code=_CLIENT_CLOSED_REQUEST)


async def on_http_exception(request: Request, error: Exception) -> Response:
    """An unknown route, or a route that has no such method."""
    assert isinstance(error, HTTPException)
    message = f"{error.detail}: {request.method} {request.url.path}"
    return _response(_body(message, error.status_code), error.status_code, error.headers)


async def on_unexpected(request: Request, error: Exception) -> Response:
    """The answer says nothing of the inside; the server logs the traceback when it re-raises."""
    return error_response(CBError("internal error; the server's log has the details"))


EXCEPTION_HANDLERS: dict[Any, Any] = {
    CBError: on_cb_error,
    ClientLeftError: on_client_left,
    HTTPException: on_http_exception,
    Exception: on_unexpected,
}


def as_cb_error(error: Exception) -> CBError:
    """For an answer that has begun: what can still be told in band."""
    if isinstance(error, CBError):
        return error
    _logger.error("a stream failed", exc_info=error)
    return CBError("internal error; the server's log has the details")


def from_validation(error: ValidationError) -> InvalidRequestError:
    """The first finding, with the field, what was wrong and the value."""
    first = error.errors(include_url=False, include_context=False)[0]
    path = _path(first["loc"])
    field = str(first["loc"][0]) if first["loc"] else None
    match first["type"]:
        case "extra_forbidden":
            return InvalidRequestError(f"unrecognized request argument: {path}", field=field)
        case "missing":
            return InvalidRequestError(f"{path} is required", field=field)
    got = repr(first["input"])
    got = got if len(got) <= 80 else got[:77] + "..."
    message = first["msg"].removeprefix("Value error, ").removeprefix("Input ")
    return InvalidRequestError(f"{path}: {message}, got {got}", field=field)


def _path(location: tuple[int | str, ...]) -> str:
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path


def _response(body: dict[str, Any], status: int, headers: Mapping[str, str] | None) -> Response:
    """In ASCII: what an error quotes of the client's may be no Unicode."""
    content = json.dumps(body, separators=(",", ":")).encode("ascii")
    return Response(content, status, headers, media_type="application/json")


def _body(
    message: str, status: int, *, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    kind = "invalid_request_error" if status < 500 and status != 429 else "server_error"
    if status == 429:
        kind = "rate_limit_error"
    message = message[: limits.MAX_ERROR_CHARS]
    param = param and param[: limits.MAX_ERROR_CHARS]
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
