"""What a request is charged with is what a count of every row of every step gives."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence

import pytest

from cb_backend.core.request import Request, RequestStatus
from cb_backend.core.step_io import StepPlan, TokenEvent
from cb_backend.errors import ErrorInfo
from tests.core.driver import Driver, make_limits
from tests.fakes import make_request


class Count:
    """Steps with their seconds, and the same charged by hand. With `depth` steps in flight."""

    def __init__(self, rng: random.Random, depth: int) -> None:
        self.driver = Driver(make_limits(num_blocks=14, max_num_batched_tokens=11, block_size=2))
        self.scheduler = self.driver.scheduler
        self.depth = depth
        self.rng = rng
        self.requests: list[Request] = []
        self.num_compared = 0
        self._in_flight: list[tuple[StepPlan, list[Request]]] = []
        self._device: defaultdict[Request, float] = defaultdict(float)
        self._blocks: defaultdict[Request, float] = defaultdict(float)

    def add(self) -> None:
        prompt = [self.rng.randrange(3) for _ in range(self.rng.randint(1, 9))]
        request = make_request(
            f"r{len(self.requests)}", prompt, max_tokens=self.rng.randint(1, 12), stop_token_ids=[1]
        )
        self.requests.append(request)
        self.scheduler.add(request)

    def step(self) -> None:
        if self.scheduler.has_work and not self.scheduler.only_awaits:
            plan = self.scheduler.schedule()
            running = self.scheduler.running
            self._in_flight.append((plan, [running[row.request_id] for row in plan.rows]))
        while self._in_flight and (len(self._in_flight) > self.depth or self.scheduler.only_awaits):
            self._land()

    def _land(self) -> None:
        plan, requests = self._in_flight.pop(0)
        seconds = self.rng.random()
        for request, row in zip(requests, plan.rows, strict=True):
            if request.status is not RequestStatus.FINISHED:
                share = row.num_scheduled_tokens / plan.num_tokens
                self._device[request] += share * seconds
                self._blocks[request] += len(request.block_table) * seconds
        result = self.driver.executor.launch(plan).result()
        if self.rng.random() < 0.04:
            error = ErrorInfo("request_failed", "boom")
            self.take(self.scheduler.fail(plan, error, now=0.0, seconds=seconds))
            return
        self.take(self.scheduler.update(plan, result, now=0.0, seconds=seconds))

    def abort(self) -> None:
        request = self.rng.choice(self.requests)
        self.take(self.scheduler.abort(request.request_id, now=0.0))

    def take(self, events: Sequence[TokenEvent]) -> None:
        """An end must have its cost; who runs on is charged up to now when somebody asks."""
        costs = {event.request_id: event.cost for event in events if event.cost is not None}
        for request in self.requests:
            if (cost := costs.get(request.request_id)) is not None:
                self._compare(request, cost.device_seconds, cost.kv_block_seconds)
            elif request.request_id in self.scheduler.running and self.rng.random() < 0.1:
                request.charge(self.scheduler.blocks.step_seconds)
                self._compare(request, request.device_seconds, request.block_seconds)

    def _compare(self, request: Request, device_seconds: float, block_seconds: float) -> None:
        self.num_compared += 1
        assert device_seconds == pytest.approx(self._device[request]), request
        assert block_seconds == pytest.approx(self._blocks[request]), request


@pytest.mark.parametrize("depth", [0, 1])
def test_the_charges_are_those_of_a_count_by_hand(depth: int) -> None:
    num_preemptions = num_compared = 0
    for seed in range(40):
        rng = random.Random(seed)
        count = Count(rng, depth)
        for _ in range(120):
            if rng.random() < 0.25:
                count.add()
            if count.requests and rng.random() < 0.05:
                count.abort()
            count.step()
        num_compared += count.num_compared
        num_preemptions += count.scheduler.planner.num_preemptions
    assert num_preemptions > 100
    assert num_compared > 1000
