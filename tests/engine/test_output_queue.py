from __future__ import annotations

import threading

import pytest

from cb_backend.core.request import FinishReason
from cb_backend.core.step_io import NextTokens, TokenEvent
from cb_backend.engine.output_queue import OutputQueue
from cb_backend.errors import EngineDeadError
from tests.receivers import RecordingReceiver


def event(request_id: str, *token_ids: int, finish: FinishReason | None = None) -> TokenEvent:
    return TokenEvent(
        request_id=request_id, token_ids=token_ids, step=1, time=0.0, finish_reason=finish
    )


def test_a_receiver_is_called_once_per_step_with_all_its_events_in_order() -> None:
    queue, first, second = OutputQueue(), RecordingReceiver(), RecordingReceiver()
    for request_id, receiver in (("a", first), ("b", second), ("c", first)):
        queue.register(request_id, receiver)
    queue.publish([event("c", 1), event("b", 2), event("a", 3)])
    assert [[e.request_id for e in batch] for batch in first.batches] == [["c", "a"]]
    assert [[e.request_id for e in batch] for batch in second.batches] == [["b"]]


def test_nothing_follows_a_terminal_event() -> None:
    queue, receiver = OutputQueue(), RecordingReceiver()
    queue.register("a", receiver)
    queue.publish([event("a", 1, finish=FinishReason.STOP)])
    queue.publish([event("a", 2)])
    assert queue.fail_all(EngineDeadError("x"), step=2, now=0.0, final=False) == 0
    assert [e.token_ids for e in receiver.events] == [(1,)]
    assert len(queue) == 0


def test_fail_all_ends_every_live_request_with_the_error() -> None:
    queue, receiver = OutputQueue(), RecordingReceiver()
    queue.register("a", receiver)
    queue.register("b", receiver)
    assert queue.fail_all(EngineDeadError("it died"), step=2, now=0.0, final=False) == 2
    assert {e.request_id for e in receiver.events} == {"a", "b"}
    for ended in receiver.events:
        assert ended.finish_reason is FinishReason.ERROR
        assert ended.error is not None
        assert ended.error.message == "it died"
    queue.register("c", receiver)  # not final: life goes on


def test_after_the_final_failure_later_requests_get_the_same_error() -> None:
    queue = OutputQueue()
    queue.fail_all(EngineDeadError("it died"), step=0, now=0.0, final=True)
    with pytest.raises(EngineDeadError, match="it died"):
        queue.register("late", RecordingReceiver())


def test_requests_of_a_receiver_that_is_gone_are_named() -> None:
    queue, gone, alive = OutputQueue(), RecordingReceiver(gone=True), RecordingReceiver()
    queue.register("a", gone)
    queue.register("b", gone)
    queue.register("c", alive)
    assert queue.publish([event("a", 1), event("c", 1)]) == ["a", "b"]


def next_tokens(*request_ids: str) -> NextTokens:
    count = len(request_ids)
    return NextTokens(request_ids, [(7,)] * count, step=1, time=0.0, num_cached_tokens=(0,) * count)


def test_next_tokens_reach_their_only_receiver_unmade_and_several_each_its_own() -> None:
    queue, first, second = OutputQueue(), RecordingReceiver(), RecordingReceiver()
    for request_id in ("a", "b"):
        queue.register(request_id, first)
    both = next_tokens("a", "b")
    for _ in range(2):
        queue.publish(both)
    assert first.batches[0] is first.batches[1] is both
    queue.register("c", second)
    queue.publish(next_tokens("c", "a"))
    assert list(first.batches[2]) == [event("a", 7)]
    assert list(second.batches[0]) == [event("c", 7)]


def test_next_tokens_do_not_go_to_who_read_these_ids_before() -> None:
    queue, first, second = OutputQueue(), RecordingReceiver(), RecordingReceiver()
    same = next_tokens("a", "b")
    for request_id in ("a", "b"):
        queue.register(request_id, first)
    queue.publish(same)
    queue.publish([event("a", finish=FinishReason.ABORT)])
    queue.publish(same)
    assert [e.request_id for e in first.batches[-1]] == ["b"]
    queue.register("a", second)  # an id may be used again
    queue.publish(same)
    assert [e.request_id for e in second.events] == ["a"]
    queue.fail_all(EngineDeadError("it hung"), step=2, now=0.0, final=True)
    batches = len(first.batches), len(second.batches)
    queue.publish(same)  # by the step that comes back late
    assert (len(first.batches), len(second.batches)) == batches


def test_next_tokens_of_a_receiver_that_is_gone_name_its_requests_every_time() -> None:
    queue, gone = OutputQueue(), RecordingReceiver(gone=True)
    queue.register("a", gone)
    same = next_tokens("a")
    assert queue.publish(same) == queue.publish(same) == ["a"]


def test_next_tokens_are_the_events_that_they_stand_for() -> None:
    tokens = NextTokens(("a", "b"), [(1,), (2,)], step=3, time=4.0, num_cached_tokens=(5, 6))
    events = [TokenEvent("a", (1,), 3, 4.0, 5), TokenEvent("b", (2,), 3, 4.0, 6)]
    assert list(tokens) == events
    assert all(type(made) is TokenEvent for made in tokens)
    assert (len(tokens), tokens[-1], tokens[:1]) == (2, events[1], events[:1])


def test_request_ids_of_names_only_the_live_requests_of_that_receiver() -> None:
    queue, first, second = OutputQueue(), RecordingReceiver(), RecordingReceiver()
    for request_id, receiver in (("a", first), ("b", second), ("c", first)):
        queue.register(request_id, receiver)
    queue.publish([event("a", finish=FinishReason.LENGTH)])
    assert queue.request_ids_of(first) == ["c"]


def test_registering_from_many_threads_while_publishing_loses_nothing() -> None:
    queue, receiver = OutputQueue(), RecordingReceiver()

    def register(worker: int) -> None:
        for number in range(200):
            queue.register(f"{worker}-{number}", receiver)

    threads = [threading.Thread(target=register, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        queue.publish([event("0-0", 1)])
    for thread in threads:
        thread.join()
    assert queue.fail_all(EngineDeadError("x"), step=0, now=0.0, final=False) == 800
