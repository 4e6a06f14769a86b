"""What headers say of a request: for whom it is, and by which id it may be found. Pure."""

from __future__ import annotations

from starlette.requests import Request

from cb_backend import limits
from cb_backend.errors import InvalidRequestError


def tenant_of(request: Request) -> str:
    """`X-Tenant`, which a gateway in front sets; empty without it."""
    return _name(request, "X-Tenant", limits.MAX_TENANT_CHARS)


def label_of(request: Request) -> str:
    """`X-Request-Id`: the client's own, which the answer's id then repeats; need not be unique."""
    return _name(request, "X-Request-Id", limits.MAX_LABEL_CHARS - len("chatcmpl-"))


def _name(request: Request, header: str, max_chars: int) -> str:
    values = request.headers.getlist(header)
    if len(values) > 1:  # whose would count, the gateway's or the client's?
        raise InvalidRequestError(f"{header} may be given once", field=header)
    name = values[0].strip() if values else ""
    limits.check_name(header, name, max_chars)
    return name
