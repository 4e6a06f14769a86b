from __future__ import annotations

import random

import pytest

from cb_backend.core.policies import FairPolicy, Policy
from cb_backend.core.request import Request
from cb_backend.core.waiting_queue import WaitingQueue
from tests.fakes import make_request


def numbered(sequence: int, tenant: str = "") -> Request:
    request = make_request(f"r{sequence}", [1] * 3, tenant=tenant)
    request.sequence = sequence
    return request


def drain(queue: WaitingQueue) -> list[int]:
    order = []
    while queue:
        request = queue.peek()
        queue.remove(request)
        order.append(request.sequence)
    return order


def test_an_empty_queue_has_nothing_to_peek_at() -> None:
    with pytest.raises(IndexError):
        WaitingQueue(Policy()).peek()


def test_pushes_in_any_order_come_out_in_the_policys_order() -> None:
    queue, numbers = WaitingQueue(Policy()), list(range(50))
    random.Random(0).shuffle(numbers)
    for number in numbers:
        queue.push(numbered(number))
    assert [request.sequence for request in queue.in_order()] == list(range(50))
    assert queue.num_tokens == 150
    assert drain(queue) == list(range(50))
    assert queue.num_tokens == 0


def test_random_pushes_and_removals_agree_with_a_sorted_list() -> None:
    queue, rng, model = WaitingQueue(Policy()), random.Random(1), {}
    for number in range(2000):
        if model and rng.random() < 0.5:
            gone = rng.choice(list(model))
            queue.remove(model.pop(gone))
            if rng.random() < 0.3:  # it comes back under the same key, as after preemption
                model[gone] = numbered(gone)
                queue.push(model[gone])
        else:
            model[number] = numbered(number)
            queue.push(model[number])
        assert len(queue) == len(model)
        if model:
            assert queue.peek().sequence == min(model)
    assert [request.sequence for request in queue.in_order()] == sorted(model)
    assert drain(queue) == sorted(model)


def test_stale_entries_do_not_pile_up() -> None:
    queue = WaitingQueue(Policy())
    queue.push(numbered(0))
    for number in range(1, 10_000):
        request = numbered(number)
        queue.push(request)
        queue.remove(request)
    assert sum(map(len, queue._heaps.values())) < 50


def test_the_group_with_the_smallest_rank_is_next() -> None:
    policy = FairPolicy({})
    queue = WaitingQueue(policy)
    for tenant in ("a", "b"):
        policy.activated(tenant, [])
    for number, tenant in enumerate("aab"):
        queue.push(numbered(number, tenant))
    policy.counters.update(a=5.0, b=1.0)
    assert queue.peek().sequence == 2
    policy.counters.update(b=9.0)
    assert queue.peek().sequence == 0
