"""Routes for whoever runs the server: where requests stand, what steps did, and two switches.

All of them ask for the admin key. Asyncio loop.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from dataclasses import asdict

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from cb_backend.core.explain import RequestView
from cb_backend.errors import EngineNotReadyError
from cb_backend.serving.api_errors import AdminDisabledError, AdminKeyError, RequestNotFoundError
from cb_backend.serving.engine_client import EngineClient
from cb_backend.serving.json_body import read_json_object
from cb_backend.serving.protocol import KVPoolBody, PolicyBody, parse_body

Endpoint = Callable[[Request, EngineClient], Awaitable[Response]]


class AdminRoutes:
    """`engine` is set once the service has one; until then every route answers 503."""

    def __init__(self, admin_key: str | None) -> None:
        self.engine: EngineClient | None = None
        self._admin_key = admin_key

    def routes(self) -> list[Route]:
        return [
            self._route("GET", "/v1/requests", _list_requests),
            self._route("GET", "/v1/requests/{request_id}", _get_request),
            self._route("GET", "/v1/trace", _get_trace),
            self._route("POST", "/v1/policy", _use_policy),
            self._route("POST", "/v1/kv_pool", _resize_kv_pool),
        ]

    def _route(self, method: str, path: str, endpoint: Endpoint) -> Route:
        async def guarded(request: Request) -> Response:
            self._check_key(request)
            if self.engine is None:
                raise EngineNotReadyError("the service is starting")
            return await endpoint(request, self.engine)

        return Route(path, guarded, methods=[method])

    def _check_key(self, request: Request) -> None:
        if self._admin_key is None:
            raise AdminDisabledError(
                "admin routes are closed: this server has no admin key; start it with CB_ADMIN_KEY"
                " set and send `Authorization: Bearer <key>`"
            )
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        # A header is bytes, which Starlette reads as Latin-1; a terminal's are UTF-8.
        # In constant time: how long a comparison takes must not tell how much was right.
        same = hmac.compare_digest(given.strip().encode("latin-1"), self._admin_key.encode())
        if scheme.lower() != "bearer" or not same:
            raise AdminKeyError("this route needs the admin key: `Authorization: Bearer <key>`")


async def _list_requests(request: Request, engine: EngineClient) -> Response:
    return _views(await engine.live_requests())


async def _get_request(request: Request, engine: EngineClient) -> Response:
    """By the engine's id, or by an answer's, which stands for all its choices."""
    wanted = request.path_params["request_id"]
    found = [
        view
        for view in await engine.live_requests()
        if wanted in (view.request_id, view.request_id.rpartition("-")[0])
    ]
    if not found:
        raise RequestNotFoundError(f"no request {wanted!r:.80} runs or waits", field="request_id")
    return _views(found)


async def _get_trace(request: Request, engine: EngineClient) -> Response:
    return Response(await engine.trace(), media_type="application/json")


async def _use_policy(request: Request, engine: EngineClient) -> Response:
    body = parse_body(PolicyBody, await read_json_object(request))
    await engine.use_policy(body.policy)
    return JSONResponse({"policy": body.policy})


async def _resize_kv_pool(request: Request, engine: EngineClient) -> Response:
    body = parse_body(KVPoolBody, await read_json_object(request))
    await engine.resize_kv_pool(body.num_blocks)
    return JSONResponse({"num_blocks": body.num_blocks})


def _views(views: list[RequestView]) -> Response:
    return JSONResponse({"object": "list", "data": [asdict(view) for view in views]})
