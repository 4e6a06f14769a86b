from __future__ import annotations

import pytest
from serving_client import Answer, EventStream, poisson_arrivals

EVENTS = b'data: {"a": 1}\n\n: ping\n\ndata: {"b": 2}\r\n\r\ndata:[DONE]\n\n'


@pytest.mark.parametrize("size", [1, 2, 7, len(EVENTS)])
def test_events_are_the_same_however_the_connection_cuts_them(size: int) -> None:
    stream, found = EventStream(), []
    for start in range(0, len(EVENTS), size):
        found += stream.feed(EVENTS[start : start + size])
    assert found == [b'{"a": 1}', b'{"b": 2}', b"[DONE]"]


def test_an_event_is_there_with_its_last_byte_and_not_before() -> None:
    stream = EventStream()
    assert stream.feed(b'data: {"a": 1}\n') == []
    assert stream.feed(b"\n") == [b'{"a": 1}']


def answered(*events: bytes, num_output_tokens: int = 2) -> Answer:
    answer = Answer(due=10.0)
    for index, event in enumerate(events):
        answer.take(event, 11.0 + index)
    answer.check(num_output_tokens)
    return answer


CHUNK = b'{"choices": [{"text": "a"}]}'
USAGE = (
    b'{"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2,'
    b' "prompt_tokens_details": {"cached_tokens": 3}}}'
)
NO_DETAILS = (
    b'{"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2,'
    b' "prompt_tokens_details": null}}'
)


def test_a_whole_answer_has_the_times_of_its_chunks_and_the_counts_of_its_usage() -> None:
    answer = answered(CHUNK, CHUNK, USAGE, b"[DONE]")
    assert answer.error is None
    assert answer.chunk_times == [11.0, 12.0]
    assert (answer.num_prompt_tokens, answer.num_output_tokens) == (5, 2)
    assert answer.num_cached_tokens == 3


def test_a_server_need_not_tell_what_it_had_cached() -> None:
    answer = answered(CHUNK, NO_DETAILS, b"[DONE]")
    assert (answer.error, answer.num_cached_tokens) == (None, 0)


@pytest.mark.parametrize(
    ("events", "error"),
    [
        ((CHUNK, CHUNK, USAGE), "cut off"),
        ((CHUNK, b"[DONE]"), "not the number of tokens that was asked for"),
        ((USAGE, b"[DONE]"), "no chunk"),
        ((CHUNK, b'{"error": {"code": "engine_dead"}}'), "in the stream: engine_dead"),
        (
            (CHUNK, b'{"error": {"code": null, "type": "server_error"}}'),
            "in the stream: server_error",
        ),
    ],
    ids=["no [DONE]", "no usage", "no chunk", "a code", "a type"],
)
def test_an_answer_that_is_not_whole_is_an_error(events: tuple[bytes, ...], error: str) -> None:
    assert answered(*events).error == error


def test_arrivals_come_at_the_rate_and_are_those_of_the_seed() -> None:
    arrivals = poisson_arrivals(rate=4.0, count=4000, seed=1)
    assert arrivals == sorted(arrivals)
    assert arrivals[-1] == pytest.approx(1000.0, rel=0.1)
    assert arrivals == poisson_arrivals(rate=4.0, count=4000, seed=1)
    assert arrivals != poisson_arrivals(rate=4.0, count=4000, seed=2)
