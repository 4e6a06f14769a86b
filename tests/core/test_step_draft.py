"""What a draft takes over from the one before, or notes of some rows only, holds for every row."""

from __future__ import annotations

import random

import pytest

from cb_backend.core.step_io import StepPlan
from tests.core.driver import make_limits
from tests.core.test_scheduling_ahead import AheadDriver
from tests.fakes import make_request


class Checked(AheadDriver):
    """With `depth` steps in flight while another is scheduled."""

    def __init__(self, depth: int, block_size: int) -> None:
        super().__init__(
            make_limits(
                num_blocks=24 // block_size, block_size=block_size, max_num_batched_tokens=11
            )
        )
        self.depth = depth
        self.num_taken_over = 0
        self._ends: dict[str, int] = {}  # tokens that are computed once the last row is
        self._request_ids: tuple[str, ...] = ()

    def step(self) -> StepPlan:
        plan = self.launch()
        self.check_rows(plan)
        while len(self.in_flight) > self.depth:
            self.land()
        self.check_index()
        return plan

    def check_rows(self, plan: StepPlan) -> None:
        """The ids are those who run, and each row begins where the one before it ended."""
        ids = plan.rows.request_ids
        self.num_taken_over += ids is self._request_ids and bool(ids)
        self._request_ids = ids
        in_order = [request.request_id for request in self.scheduler.roster.in_order()]
        assert list(ids) == [request_id for request_id in in_order if request_id in ids]
        for admission in plan.admitted:
            self._ends[admission.request_id] = admission.num_computed_tokens
        for row in plan.rows:
            assert row.num_computed_tokens == self._ends[row.request_id]
            self._ends[row.request_id] += row.num_scheduled_tokens

    def check_index(self) -> None:
        """Every block full of tokens whose step is over has been shown to the prefix cache."""
        rows = [row for plan in self.in_flight for row in plan.rows]
        for request in self.scheduler.running.values():
            shares = [r.num_scheduled_tokens for r in rows if r.request_id == request.request_id]
            num_over = request.num_computed_tokens - sum(shares)
            assert request.num_indexed_blocks == num_over // self.scheduler.limits.block_size


@pytest.mark.parametrize("block_size", [1, 2, 4])
@pytest.mark.parametrize("depth", [0, 1])
def test_a_draft_is_as_if_it_had_looked_at_every_row(depth: int, block_size: int) -> None:
    num_taken_over = num_preemptions = 0
    for seed in range(20):
        rng = random.Random(seed)
        driver = Checked(depth, block_size)
        for number in range(100):
            if rng.random() < 0.25:
                prompt = [rng.randrange(3) for _ in range(rng.randint(1, 9))]
                driver.add(make_request(f"r{number}", prompt, max_tokens=rng.randint(1, 12)))
            if rng.random() < 0.05:
                driver.abort(f"r{rng.randrange(number + 1)}")
            driver.step()
        num_taken_over += driver.num_taken_over
        num_preemptions += driver.scheduler.planner.num_preemptions
    assert num_taken_over > 200
    assert num_preemptions > 20
