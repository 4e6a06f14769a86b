"""The admin routes, over an engine in this process and over a runner's socket."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from cb_backend.engine.engine import Engine
from cb_backend.serving.engine_client import EngineClient, LocalClient
from cb_backend.serving.gateway import Gateway
from cb_backend.serving.remote_client import RemoteClient
from cb_backend.serving.text_codec import TextCodec
from tests.serving.conftest import (
    Script,
    WatchedEngine,
    chat,
    gateway,
    running_engine,
    served,
    until,
)
from tests.serving.remote import runner

pytestmark = pytest.mark.anyio

KEY = "kéy of the operator"
ROUTES = [
    ("GET", "/v1/requests"),
    ("GET", "/v1/requests/abc"),
    ("GET", "/v1/trace"),
    ("POST", "/v1/policy"),
    ("POST", "/v1/kv_pool"),
]


@contextlib.asynccontextmanager
async def gateway_of(
    client: EngineClient, codec: TextCodec, key: str | None = KEY
) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(gateway(client, codec, admin_key=key))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
        yield http


@pytest.fixture
def engine(script: Script) -> Any:
    with running_engine(script, max_num_seqs=1) as engine:
        yield engine


@pytest.fixture(params=["local", "remote"])
async def http(
    request: pytest.FixtureRequest, engine: WatchedEngine, codec: TextCodec, tmp_path: Path
) -> AsyncIterator[httpx.AsyncClient]:
    async with contextlib.AsyncExitStack() as stack:
        client: EngineClient = LocalClient(engine)
        if request.param == "remote":
            await stack.enter_async_context(served(runner(engine).application(), tmp_path / "s"))
            client = RemoteClient(f"file://{tmp_path / 's'}")
            stack.push_async_callback(client.close)
        yield await stack.enter_async_context(gateway_of(client, codec))


def bearer(key: str = KEY) -> dict[str, bytes]:
    return {"authorization": b"Bearer " + key.encode()}


async def ask(http: httpx.AsyncClient, method: str, path: str, body: Any = None) -> httpx.Response:
    return await http.request(method, path, headers=bearer(), json=body)


@pytest.mark.parametrize(("method", "path"), ROUTES)
async def test_without_a_configured_key_the_route_is_closed_and_says_how_to_open_it(
    engine: WatchedEngine, codec: TextCodec, method: str, path: str
) -> None:
    async with gateway_of(LocalClient(engine), codec, key=None) as http:
        for headers in ({}, bearer(), {"authorization": "Bearer "}):
            response = await http.request(method, path, headers=headers)
            assert response.status_code == 403
            assert "CB_ADMIN_KEY" in response.json()["error"]["message"]


@pytest.mark.parametrize(("method", "path"), ROUTES)
@pytest.mark.parametrize(
    "authorization",
    [None, "", "Bearer", "Bearer ", "Bearer wrong", KEY.encode(), b"Basic " + KEY.encode()],
)
async def test_a_wrong_key_opens_nothing_and_is_not_logged(
    engine: WatchedEngine,
    codec: TextCodec,
    caplog: pytest.LogCaptureFixture,
    method: str,
    path: str,
    authorization: str | bytes | None,
) -> None:
    caplog.set_level(logging.DEBUG, "cb_backend")
    headers: Any = {} if authorization is None else {"authorization": authorization}
    async with gateway_of(LocalClient(engine), codec) as http:
        response = await http.request(method, path, headers=headers)
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    assert KEY not in response.text + caplog.text


async def test_a_gateway_without_an_engine_yet_answers_503() -> None:
    transport = httpx.ASGITransport(Gateway(admin_key=KEY).application())
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
        assert (await ask(http, "GET", "/v1/requests")).status_code == 503


async def test_each_request_is_told_where_it_stands(
    http: httpx.AsyncClient, engine: WatchedEngine, script: Script
) -> None:
    script.say("the quick brown fox " * 20)
    # Calls are answered between two steps, of which there are few enough to be slow.
    slow = threading.Event()

    def before_step(plan: object) -> None:
        slow.wait(0.01)

    script.before_step = before_step
    clients = []
    for label, fields in (("mine", {"n": 2}), ("yours", {"priority": 3})):
        headers = {"x-request-id": label, "x-tenant": f"team-{label}"}
        clients.append(
            asyncio.create_task(
                http.post("/v1/chat/completions", json=chat(**fields), headers=headers)
            )
        )
        await until(lambda: engine.num_live >= 1)
    await until(lambda: engine.num_live == 3)
    views: list[Any] = []
    while not views or views[0]["state"] != "running":
        views = (await ask(http, "GET", "/v1/requests")).json()["data"]
    assert len(views) == 3
    assert {view["tenant"] for view in views} == {"team-mine", "team-yours"}
    running, *others = views
    assert running["waits_for"] == ""
    assert all(view["waits_for"] for view in others)
    assert all(view["seconds_to_end"] is None or view["seconds_to_end"] > 0 for view in views)

    mine = (await ask(http, "GET", "/v1/requests/chatcmpl-mine")).json()["data"]
    assert [view["tenant"] for view in mine] == ["team-mine"] * 2
    one = (await ask(http, "GET", f"/v1/requests/{mine[0]['request_id']}")).json()["data"]
    assert [view["request_id"] for view in one] == [mine[0]["request_id"]]
    nobody = await ask(http, "GET", "/v1/requests/chatcmpl-min")
    assert (nobody.status_code, nobody.json()["error"]["code"]) == (404, "request_not_found")

    slow.set()
    for response in await asyncio.gather(*clients):
        assert response.status_code == 200
    assert (await ask(http, "GET", "/v1/requests")).json() == {"object": "list", "data": []}


async def test_an_answers_id_is_the_one_to_ask_for(
    http: httpx.AsyncClient, engine: WatchedEngine, script: Script
) -> None:
    labelled = await http.post("/v1/completions", json={"prompt": "a<|go|>"})
    assert labelled.json()["id"].startswith("cmpl-")
    (record, *_) = engine.step_log()
    ((request_id, _),) = record.rows
    assert request_id.rpartition("-")[0] == labelled.json()["id"]


async def test_the_trace_has_every_step(http: httpx.AsyncClient, engine: WatchedEngine) -> None:
    await http.post("/v1/chat/completions", json=chat(n=2))
    response = await ask(http, "GET", "/v1/trace")
    assert response.headers["content-type"] == "application/json"
    steps = [e for e in response.json()["traceEvents"] if e["name"].startswith("step ")]
    assert len(steps) == len(engine.step_log()) > 0


async def test_the_policy_changes_while_the_engine_runs(
    http: httpx.AsyncClient, engine: WatchedEngine
) -> None:
    response = await ask(http, "POST", "/v1/policy", {"policy": "fair"})
    assert (response.status_code, response.json()) == (200, {"policy": "fair"})
    assert await engine.call(lambda inner: inner.scheduler.roster.policy.name) == "fair"
    for body in ({"policy": "lifo"}, {"policy": 5}, {}, {"policy": "fair", "more": 1}):
        refused = await ask(http, "POST", "/v1/policy", body)
        assert refused.status_code == 400, body
    assert (
        "deadline, fair, fcfs, priority"
        in (await ask(http, "POST", "/v1/policy", {"policy": "lifo"})).json()["error"]["message"]
    )


async def test_the_kv_pool_grows_and_shrinks_by_order(
    http: httpx.AsyncClient, engine: WatchedEngine
) -> None:
    for num_blocks in (100, 200):
        response = await ask(http, "POST", "/v1/kv_pool", {"num_blocks": num_blocks})
        assert (response.status_code, response.json()) == (200, {"num_blocks": num_blocks})
        assert await engine.call(lambda inner: inner.scheduler.blocks.pool.num_blocks) == num_blocks
    assert (await http.post("/v1/chat/completions", json=chat())).status_code == 200


async def test_a_size_of_the_pool_that_cannot_be_is_refused_and_nothing_changes(
    http: httpx.AsyncClient, engine: WatchedEngine
) -> None:
    def nearly_full(inner: Engine) -> None:
        inner.executor.free = 10 * inner.executor.model_info.bytes_per_block  # type: ignore[attr-defined]

    await engine.call(nearly_full)
    before = await engine.call(lambda inner: inner.scheduler.blocks.pool.num_blocks)
    for num_blocks, said in ((1, "at least"), (-5, "at least"), (before + 11, "GiB free")):
        response = await ask(http, "POST", "/v1/kv_pool", {"num_blocks": num_blocks})
        assert response.status_code == 400
        assert said in response.json()["error"]["message"]
    for body in ({"num_blocks": "9"}, {"num_blocks": 1.5}, {"num_blocks": True}, {}):
        assert (await ask(http, "POST", "/v1/kv_pool", body)).status_code == 400
    assert await engine.call(lambda inner: inner.scheduler.blocks.pool.num_blocks) == before
    grown = await ask(http, "POST", "/v1/kv_pool", {"num_blocks": before + 10})
    assert grown.status_code == 200
