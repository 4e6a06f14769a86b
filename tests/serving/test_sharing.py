"""Many clients on one engine: tenants, labels, costs, deadlines, pins."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from cb_backend.serving.async_engine import AsyncEngine
from cb_backend.serving.engine_client import (
    LocalClient,
)
from cb_backend.serving.text_codec import TextCodec
from tests.serving.conftest import (
    Script,
    chat,
    completion,
    gateway,
    running_engine,
)
from tests.serving.routes import CHAT, COMPLETIONS, stream_of, text_of, whole

pytestmark = pytest.mark.anyio


async def test_concurrent_answers_do_not_mix(engine: AsyncEngine, codec: TextCodec) -> None:
    transport = httpx.ASGITransport(gateway(LocalClient(engine), codec))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
        streams = await asyncio.gather(*(stream_of(http, CHAT, chat(f"{n}")) for n in range(60)))
    assert {text_of(events) for events in streams} == {"the quick brown fox"}
    assert len({events[0]["id"] for events in streams}) == 60


async def test_no_tenant_finds_what_another_has_cached(http: httpx.AsyncClient) -> None:
    async def cached_by(tenant: str | None) -> int:
        headers = {} if tenant is None else {"x-tenant": tenant}
        body = chat("one two three four five six seven")
        usage = (await http.post(CHAT, json=body, headers=headers)).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    for tenant in ("a", "b", None):
        assert await cached_by(tenant) == 0
    for tenant in ("a", "b", None):
        assert await cached_by(tenant) > 0


@pytest.mark.parametrize("header", ["X-Tenant", "X-Request-Id"])
@pytest.mark.parametrize("values", [["a b"], ["a/b"], ["x" * 200], ["a", "b"]])
async def test_a_header_that_is_no_name_is_refused(
    http: httpx.AsyncClient, header: str, values: list[str]
) -> None:
    response = await http.post(CHAT, json=chat(), headers=[(header, value) for value in values])
    assert response.status_code == 400
    assert response.json()["error"]["param"] == header


async def test_a_request_id_is_a_label_that_two_may_share(http: httpx.AsyncClient) -> None:
    headers = {"x-request-id": "mine"}
    bodies = [chat("one"), chat("two three")]
    answers = await asyncio.gather(*(http.post(CHAT, json=b, headers=headers) for b in bodies))
    assert [answer.json()["id"] for answer in answers] == ["chatcmpl-mine"] * 2
    alone = [(await whole(http, CHAT, body))["usage"]["prompt_tokens"] for body in bodies]
    assert [answer.json()["usage"]["prompt_tokens"] for answer in answers] == alone


@pytest.mark.parametrize("stop", [None, " quick"])
@pytest.mark.parametrize("stream", [False, True])
async def test_usage_tells_the_cost_however_the_answer_ends(
    http: httpx.AsyncClient, stop: str | None, stream: bool
) -> None:
    body = chat(n=2, stop=stop)
    if stream:
        body["stream_options"] = {"include_usage": True}
        usage = (await stream_of(http, CHAT, body))[-1]["usage"]
    else:
        usage = (await whole(http, CHAT, body))["usage"]
    cost = usage["cb_cost"]
    assert set(cost) == {"device_ms", "kv_block_seconds", "tokens_saved", "preemptions"}
    assert cost["device_ms"] > 0
    assert cost["kv_block_seconds"] > 0
    assert cost["tokens_saved"] == usage["prompt_tokens"] - 1, "which the choices share"
    assert cost["preemptions"] == 0


async def test_a_deadline_out_of_reach_is_refused_before_it_is_computed(
    script: Script, codec: TextCodec
) -> None:
    with running_engine(script, policy="deadline") as engine:
        transport = httpx.ASGITransport(gateway(LocalClient(engine), codec))
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
            for _ in range(3):  # the rates are measured now
                await whole(http, CHAT, chat(deadline_s=60))
            steps = engine.stats().steps
            for stream in (False, True):
                body = chat(deadline_s=1e-6, stream=stream)
                response = await http.post(CHAT, json=body)
                assert response.status_code == 429
                error = response.json()["error"]
                assert (error["code"], error["param"]) == ("deadline_unreachable", "deadline_s")
                assert "would take about" in error["message"]
            assert engine.stats().steps == steps


async def test_a_pinned_prefix_outlives_what_would_evict_it(
    http: httpx.AsyncClient, script: Script
) -> None:
    pinned = chat("one two three four five six seven", pin_prefix_s=600)
    await whole(http, CHAT, pinned)
    script.say("the quick " * 100)
    for number in range(8):  # each as long as half of the pool
        await whole(http, COMPLETIONS, completion(f"{number}<|go|>"))
    again = await whole(http, CHAT, pinned)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


async def test_a_pin_without_a_prefix_cache_is_refused(script: Script, codec: TextCodec) -> None:
    with running_engine(script, enable_prefix_caching=False) as engine:
        transport = httpx.ASGITransport(gateway(LocalClient(engine), codec))
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
            response = await http.post(CHAT, json=chat(pin_prefix_s=60))
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "pin_prefix_s"
