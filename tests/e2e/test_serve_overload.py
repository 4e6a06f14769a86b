"""A real `bentoml serve` with few places: choices, refusals, and what its operator can see."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.serving_process import ServingProcess, serving
from tests.e2e.tiny_model import CONTEXT, write_tiny_model

pytestmark = [pytest.mark.serve, pytest.mark.timeout(240)]

MODEL = "tiny"
COMPLETIONS = "/v1/completions"
ADMIN_KEY = "only for the operator"
PLACES = 4  # two run, two wait
CANARY = {"prompt": "the quick brown fox", "max_tokens": 12, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServingProcess]:
    folder = write_tiny_model(tmp_path_factory.mktemp("model") / MODEL)
    with serving(
        ".",
        tmp_path_factory.mktemp("bentoml"),
        CB_MODEL=str(folder),
        CB_MAX_NUM_SEQS="2",
        CB_MAX_NUM_WAITING=str(PLACES - 2),
        CB_ADMIN_KEY=ADMIN_KEY,
    ) as server:
        yield server


@pytest.fixture(autouse=True)
def leaves_nothing_behind(server: ServingProcess) -> Iterator[None]:
    yield
    server.wait_until(server.is_idle)
    assert server.http.post(COMPLETIONS, json=CANARY).status_code == 200
    assert ADMIN_KEY not in server.log.read_text()


@pytest.fixture
def client(server: ServingProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@contextlib.asynccontextmanager
async def all_places_taken(server: ServingProcess) -> AsyncIterator[httpx.AsyncClient]:
    """By tenants `t0`, `t1` and so on, one after the other, who leave with the block."""
    body = CANARY | {"max_tokens": CONTEXT - 64}
    async with httpx.AsyncClient(base_url=server.url, timeout=60.0) as http:
        clients = []
        for number in range(PLACES):
            headers = {"x-tenant": f"t{number}", "x-request-id": f"r{number}"}
            clients.append(asyncio.create_task(http.post(COMPLETIONS, json=body, headers=headers)))
            await asyncio.to_thread(server.wait_until, lambda: num_live(server) == len(clients))
        yield http
        for client in clients:
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)


def num_live(server: ServingProcess) -> int:
    return len(admin_get(server, "/v1/requests")["data"])


def admin_get(server: ServingProcess, path: str) -> Any:
    response = server.http.get(path, headers={"authorization": f"Bearer {ADMIN_KEY}"})
    assert response.status_code == 200, response.text
    return response.json()


def test_the_openai_client_streams_three_choices(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "hi"}],
        n=3,
        max_tokens=20,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    texts, reasons = ["", "", ""], ["", "", ""]
    for chunk in stream:
        for choice in chunk.choices:
            assert not reasons[choice.index], "nothing comes after a finish reason"
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or ""
        usage = chunk.usage
    assert reasons == ["length"] * 3
    assert texts[0]
    assert len(set(texts)) == 1
    assert usage is not None
    assert usage.completion_tokens == 3 * 20
    cost = usage.model_extra["cb_cost"]  # type: ignore[index]
    assert cost["device_ms"] > 0
    assert cost["tokens_saved"] > 0, "which the choices share"


def test_a_seed_gives_choices_that_differ_and_can_be_had_again(client: openai.OpenAI) -> None:
    def choices(seed: int) -> list[str]:
        answer = client.completions.create(
            model=MODEL, prompt="the fox", n=4, seed=seed, temperature=1.0, max_tokens=16
        )
        return [choice.text for choice in answer.choices]

    first = choices(5)
    assert len(set(first)) == 4
    assert choices(5) == first
    assert choices(500) != first


@pytest.mark.anyio
async def test_beyond_the_last_place_a_client_is_told_when_to_come_back(
    server: ServingProcess,
) -> None:
    async with all_places_taken(server) as http:
        for stream in (False, True):
            response = await http.post(COMPLETIONS, json=CANARY | {"stream": stream})
            assert response.status_code == 429
            assert int(response.headers["retry-after"]) >= 1
            assert response.json()["error"]["code"] == "overloaded"
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0
        ) as client:
            with pytest.raises(openai.RateLimitError, match="try again later"):
                await client.completions.create(model=MODEL, prompt="hi")


def test_a_hundred_and_fifty_requests_at_once_are_all_answered(server: ServingProcess) -> None:
    def ask(number: int) -> httpx.Response:
        # A connection of its own: threads that share a client close each other's.
        body = CANARY | {"stream": number % 2 == 0}
        return httpx.post(server.url + COMPLETIONS, json=body, timeout=60.0)

    with ThreadPoolExecutor(150) as pool:
        answers = list(pool.map(ask, range(150)))
    assert {answer.status_code for answer in answers} == {200, 429}
    refused = [answer for answer in answers if answer.status_code == 429]
    assert all("retry-after" in answer.headers for answer in refused)


@pytest.mark.anyio
async def test_the_operator_sees_who_runs_and_why_others_wait(server: ServingProcess) -> None:
    async with all_places_taken(server):
        views = admin_get(server, "/v1/requests")["data"]
        assert [view["state"] for view in views] == ["running"] * 2 + ["waiting"] * 2
        assert [view["tenant"] for view in views] == [f"t{number}" for number in range(PLACES)]
        assert [bool(view["waits_for"]) for view in views] == [False, False, True, True]
        (mine,) = admin_get(server, "/v1/requests/cmpl-r3")["data"]
        assert (mine["tenant"], mine["position"]) == ("t3", 1)
        trace = admin_get(server, "/v1/trace")["traceEvents"]
        assert any(event["name"].startswith("cmpl-r0-") for event in trace)
    # Those who left are charged all the same.
    server.wait_until(lambda: server.metric('cb_tenant_device_seconds_total{tenant="t0"}') > 0)


@pytest.mark.parametrize("key", [None, "wrong"])
def test_without_the_key_nothing_is_seen_or_changed(
    server: ServingProcess, key: str | None
) -> None:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    for path in ("/v1/requests", "/v1/requests/x", "/v1/trace"):
        assert server.http.get(path, headers=headers).status_code == 401
    for path, body in (("/v1/policy", {"policy": "fair"}), ("/v1/kv_pool", {"num_blocks": 9})):
        assert server.http.post(path, json=body, headers=headers).status_code == 401


def test_the_operator_changes_the_policy_and_the_pool(server: ServingProcess) -> None:
    def post(path: str, body: dict[str, Any]) -> httpx.Response:
        headers = {"authorization": f"Bearer {ADMIN_KEY}"}
        return server.http.post(path, json=body, headers=headers)

    refused = post("/v1/kv_pool", {"num_blocks": 1})
    assert refused.status_code == 400
    fewest = re.search(r"at least (\d+)", refused.json()["error"]["message"])
    assert fewest is not None
    for path, body in (
        ("/v1/policy", {"policy": "fair"}),
        ("/v1/kv_pool", {"num_blocks": int(fewest[1])}),
        ("/v1/policy", {"policy": "fcfs"}),
    ):
        response = post(path, body)
        assert (response.status_code, response.json()) == (200, body)
        assert server.http.post(COMPLETIONS, json=CANARY).status_code == 200
