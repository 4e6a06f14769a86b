"""A real `bentoml serve` of a tiny model, driven by the openai client and by raw HTTP."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
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
MAX_NUM_SEQS = 4
ABORTED = 'cb_requests_finished_total{reason="abort"}'
# Greedy, so the same each time.
CANARY = {"prompt": "the quick brown fox", "max_tokens": 12, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServingProcess]:
    folder = write_tiny_model(tmp_path_factory.mktemp("model") / MODEL)
    with serving(
        ".",
        tmp_path_factory.mktemp("bentoml"),
        CB_MODEL=str(folder),
        CB_MAX_NUM_SEQS=str(MAX_NUM_SEQS),
    ) as server:
        yield server


@pytest.fixture(scope="module")
def canary(server: ServingProcess) -> Any:
    return server.http.post(COMPLETIONS, json=CANARY).json()["choices"]


@pytest.fixture(autouse=True)
def leaves_nothing_behind(server: ServingProcess, canary: Any) -> Iterator[None]:
    yield
    server.wait_until(server.is_idle)
    assert server.status_of("/livez") == 200
    assert server.status_of("/readyz") == 200
    assert server.http.post(COMPLETIONS, json=CANARY).json()["choices"] == canary


@pytest.fixture
def client(server: ServingProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def endless(**fields: Any) -> dict[str, Any]:
    """A request that goes on until its client leaves, or for minutes."""
    return CANARY | {"max_tokens": CONTEXT - 64} | fields


@contextlib.contextmanager
def streaming(server: ServingProcess, body: dict[str, Any]) -> Iterator[Iterator[bytes]]:
    """A client of its own that has begun to read its stream, and leaves with the block."""
    with (
        httpx.Client(base_url=server.url, timeout=60.0) as client,
        client.stream("POST", COMPLETIONS, json=body | {"stream": True}) as response,
    ):
        assert response.status_code == 200
        pieces = response.iter_bytes()
        assert next(pieces)
        yield pieces


def text_of(stream: str) -> str:
    events = [event.removeprefix("data: ") for event in stream.split("\n\n") if event]
    assert events[-1] == "[DONE]"
    return "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])


def test_the_openai_client_chats(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    messages: Any = [{"role": "user", "content": "hi"}]
    answer = client.chat.completions.create(
        model=MODEL, messages=messages, temperature=0, max_tokens=20
    )
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    *deltas, last = client.chat.completions.create(
        model=MODEL,
        messages=messages,
        temperature=0,
        max_tokens=20,
        stream=True,
        stream_options={"include_usage": True},
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in deltas)
    assert text == answer.choices[0].message.content
    assert deltas[-1].choices[0].finish_reason == answer.choices[0].finish_reason
    assert last.usage is not None
    assert last.usage.completion_tokens == answer.usage.completion_tokens


def test_the_openai_client_understands_our_refusals(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="gpt-4"):
        client.completions.create(model="gpt-4", prompt="hi")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model=MODEL, prompt="hi", temperature=-1)
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=MODEL, prompt="hi", max_tokens=CONTEXT)
    assert refused.value.code == "context_length_exceeded"


def test_a_later_request_is_answered_while_a_long_stream_runs(
    server: ServingProcess, canary: Any
) -> None:
    with streaming(server, endless()) as pieces:
        assert server.http.post(COMPLETIONS, json=CANARY).json()["choices"] == canary
        assert next(pieces)
        server.wait_until(lambda: server.metric("cb_requests_running") == 1)


def test_a_client_that_leaves_a_stream_frees_its_blocks(server: ServingProcess) -> None:
    aborts = server.metric(ABORTED)
    with streaming(server, endless()):
        server.wait_until(lambda: server.metric("cb_kv_cache_usage_ratio") > 0)
    server.wait_until(server.is_idle)
    assert server.metric(ABORTED) == aborts + 1


def test_a_client_that_leaves_without_streaming_frees_its_blocks(server: ServingProcess) -> None:
    aborts = server.metric(ABORTED)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(server.url + COMPLETIONS, json=endless(), timeout=1.0)
    server.wait_until(lambda: server.metric(ABORTED) == aborts + 1)
    server.wait_until(server.is_idle)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_the_queue_is_never_computed(
    server: ServingProcess, stream: bool
) -> None:
    aborts = server.metric(ABORTED)
    with contextlib.ExitStack() as running:
        for _ in range(MAX_NUM_SEQS):
            running.enter_context(streaming(server, endless()))
        server.wait_until(lambda: server.metric("cb_requests_running") == MAX_NUM_SEQS)
        computed = server.metric("cb_computed_tokens_total")
        queued = endless(stream=stream, prompt=[9] * 40_000, max_tokens=1000)
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(server.url + COMPLETIONS, json=queued, timeout=1.0)
        server.wait_until(lambda: server.metric(ABORTED) == aborts + 1)
        assert server.metric("cb_requests_waiting") == 0
        assert server.metric("cb_requests_running") == MAX_NUM_SEQS
        # The others went on meanwhile, by far fewer tokens than this prompt has.
        assert server.metric("cb_computed_tokens_total") < computed + 40_000


BAD = [
    (b"{", 400),
    (b'{"prompt": ""}', 400),
    (b'{"prompt": "hi", "temperature": NaN}', 400),
    (b'{"prompt": "hi", "temperature": -1}', 400),
    (b'{"prompt": [49152]}', 400),
    (b'{"prompt": [-1]}', 400),
    (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400),
    (json.dumps({"prompt": "word " * 400_000}).encode(), 400),
    (json.dumps({"prompt": [9] * CONTEXT}).encode(), 400),
    (json.dumps({"prompt": "hi", "max_tokens": 10**9}).encode(), 400),
    (b'{"prompt": "a\\ud83d b"}', 400),
    (b'{"prompt": "hi", "model": "no"}', 404),
    (b'{"prompt": "' + b"x" * (9 * 2**20) + b'"}', 413),
]


def test_bad_input_does_not_disturb_the_stream_beside_it(server: ServingProcess) -> None:
    body = endless(max_tokens=1500)
    alone = server.http.post(COMPLETIONS, json=body).json()["choices"][0]["text"]
    received: list[bytes] = []
    with streaming(server, body | {"stream_options": None}) as pieces:
        for content, status in BAD:
            response = server.http.post(COMPLETIONS, content=content)
            assert response.status_code == status, (content[:80], response.text)
            assert response.json()["error"]["message"]
        received.extend(pieces)
    # The first piece was read when the stream began.
    text = text_of(b"".join(received).decode())
    assert alone.endswith(text)
    assert len(alone) - len(text) < len(alone) / 2


def test_a_hundred_and_fifty_streams_at_once_all_end(server: ServingProcess, canary: Any) -> None:
    def ask(_: int) -> str:
        # A connection of its own: threads that share a client close each other's.
        body = CANARY | {"stream": True}
        return text_of(httpx.post(server.url + COMPLETIONS, json=body, timeout=60.0).text)

    with ThreadPoolExecutor(150) as pool:
        assert set(pool.map(ask, range(150))) == {canary[0]["text"]}


def test_metrics_tell_what_happened(server: ServingProcess) -> None:
    # Counts are copied a moment later: a canary's few tokens may still be on their way.
    slack, num_tokens = CANARY["max_tokens"], 500
    names = (
        "cb_generation_tokens_total",
        "cb_inter_token_latency_seconds_count",
        "cb_prompt_tokens_total",
        "cb_time_to_first_token_seconds_count",
    )
    # What the tests before have asked for is copied within a moment, too.
    changed, last = time.monotonic(), -1.0

    def is_settled() -> bool:
        nonlocal changed, last
        if (now := server.metric(names[0])) != last:
            changed, last = time.monotonic(), now
        return time.monotonic() > changed + 1.5

    server.wait_until(is_settled)
    before = {name: server.metric(name) for name in names}
    usage = server.http.post(COMPLETIONS, json=endless(max_tokens=num_tokens)).json()["usage"]
    assert usage["completion_tokens"] == num_tokens
    for name in names[:2]:
        server.wait_until(lambda name=name: server.metric(name) >= before[name] + num_tokens - 1)
        assert server.metric(name) <= before[name] + num_tokens + slack
    assert server.metric(names[2]) >= before[names[2]] + usage["prompt_tokens"]
    assert server.metric(names[3]) == before[names[3]] + 1
