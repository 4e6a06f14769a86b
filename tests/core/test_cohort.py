"""A step that goes on from the one before is what asking every request gives: the same plan, the
same events, the same blocks and the same charges, whatever happens in between."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Sequence

import pytest

from cb_backend.config import EngineConfig
from cb_backend.core.cohort import Cohort
from cb_backend.core.invariants import check_plan, check_scheduler
from cb_backend.core.policies import POLICIES, FairPolicy, policy_of
from cb_backend.core.pool_resize import resize_pool
from cb_backend.core.request import Request
from cb_backend.core.scheduler import Scheduler
from cb_backend.core.step_io import StepPlan, StepResult, TokenEvent
from cb_backend.errors import ErrorInfo
from tests.core.driver import make_limits, shares
from tests.core.test_scheduling_ahead import AheadDriver
from tests.fakes import make_request, next_by_hashing, solo_output

CONFIG = EngineConfig(model="none", priority_ageing_s=3.0, tenant_weights={"a": 1.0, "b": 2.0})
STOP = 1  # the token that ends those who have one
ERROR = ErrorInfo("request_failed", "boom")


class Pair:
    """Two schedulers to which the same happens. In `slow` something has always changed since the
    step before, so that none goes on; `depth` steps are in flight when another is scheduled."""

    def __init__(self, rng: random.Random, policy: str, depth: int, window: int | None) -> None:
        limits = make_limits(
            num_blocks=rng.choice([12, 14, 40]),
            block_size=rng.choice([1, 2, 4]),
            max_num_seqs=rng.choice([3, 6]),
            max_num_batched_tokens=rng.choice([8, 14]),
            max_prefill_chunk=rng.choice([3, 7]),
            enable_prefix_caching=rng.random() < 0.8,
            num_host_blocks=rng.choice([0, 4]),
            window=window,
        )
        self.quick = Scheduler(limits, policy_of(CONFIG, policy))
        self.slow = Scheduler(limits, policy_of(CONFIG, policy))
        self.rng, self.depth, self.now = rng, depth, 0.0
        self.requests: list[tuple[Request, Request]] = []
        self.in_flight: deque[tuple[StepPlan, StepPlan]] = deque()
        self.num_gone_on = 0
        self.seen: Counter[str] = Counter()

    def add(self) -> None:
        rng, name = self.rng, f"r{len(self.requests)}"
        alive = list(self.quick.running) + [r.request_id for r in self.quick.waiting]
        forked = rng.choice(alive) if alive and rng.random() < 0.2 else None
        parent = self.quick.roster.find(forked)
        prompt = [rng.randrange(3) for _ in range(rng.randint(1, 8))]
        if parent is not None:
            prompt = parent.token_ids[: parent.num_prompt_tokens]
        wishes = {
            "max_tokens": rng.randint(1, 24) if rng.random() < 0.5 else 24,
            "stop_token_ids": [STOP] if rng.random() < 0.4 else [],
            "priority": rng.randrange(3),
            "tenant": rng.choice("abc"),
            "deadline": self.now + rng.choice([2.0, 30.0, 1e9]),
            "arrival_time": self.now,
            "fork_of": forked,
            "pin_s": rng.choice([0.0, 0.0, 8.0]),
        }
        pair = make_request(name, prompt, **wishes), make_request(name, prompt, **wishes)
        needed = len(prompt) + pair[0].max_tokens
        if needed <= self.quick.blocks.pool.num_blocks * self.quick.limits.block_size:
            self.requests.append(pair)
            self.quick.add(pair[0])
            self.slow.add(pair[1])
            self.seen["forks"] += bool(self.quick.roster.forks)

    def disturb(self) -> None:
        rng, what = self.rng, self.rng.choice(["abort", "abort", "policy", "resize"])
        if what == "abort" and self.requests:
            name = rng.choice(self.requests[-6:])[0].request_id
            events = self.quick.abort(name, self.now)
            assert events == self.slow.abort(name, self.now)
            self._note(events)
        elif what == "policy" and rng.random() < 0.3:
            policy = rng.choice(sorted(POLICIES))
            for scheduler in (self.quick, self.slow):
                scheduler.roster.use(policy_of(CONFIG, policy))
        elif what == "resize" and not self.in_flight:
            num_blocks = rng.randint(33, 40)  # what any request may need, in tokens
            change = resize_pool(self.quick, num_blocks, fewest=1)
            assert change == resize_pool(self.slow, num_blocks, fewest=1)

    def step(self) -> None:
        if self.quick.has_work and not self.quick.only_awaits:
            quick = self.quick.schedule()
            self.slow.roster.num_changes += 1
            slow = self.slow.schedule()
            self.slow.roster.num_changes += 1
            assert quick == slow
            check_plan(self.quick, quick)
            self.in_flight.append((quick, slow))
            self.num_gone_on += self.quick._last_draft.num_on > 0
            assert self.slow._last_draft.cohort is None
        while self.in_flight and (len(self.in_flight) > self.depth or self.quick.only_awaits):
            self.land()
        self.compare()

    def land(self) -> None:
        quick, slow = self.in_flight.popleft()
        self.now += 1.0
        seconds = self.rng.random()
        if self.rng.random() < 0.01:
            events = self.quick.fail(quick, ERROR, self.now, seconds)
            assert events == self.slow.fail(slow, ERROR, self.now, seconds)
        else:
            result = self._result(quick)
            events = self.quick.update(quick, result, self.now, seconds)
            assert list(events) == list(self.slow.update(slow, result, self.now, seconds))
        self._note(events)

    def compare(self) -> None:
        check_scheduler(self.quick)
        for quick, slow in self.requests:
            for name in Request.__slots__:
                assert getattr(quick, name) == getattr(slow, name), (name, quick, slow)
        pools = self.quick.blocks.pool, self.slow.blocks.pool
        assert pools[0].free_blocks == pools[1].free_blocks
        assert pools[0].idle_blocks == pools[1].idle_blocks
        assert self.quick.num_output_tokens == self.slow.num_output_tokens
        policies = self.quick.roster.policy, self.slow.roster.policy
        if isinstance(policies[0], FairPolicy) and isinstance(policies[1], FairPolicy):
            assert policies[0].counters == policies[1].counters

    def _result(self, plan: StepPlan) -> StepResult:
        """In another order than the rows'. Now and then a row fails, or brings several tokens."""
        result, rows = StepResult({}, {}), list(plan.rows)
        self.rng.shuffle(rows)
        for row in rows:
            if self.rng.random() < 0.002:
                result.failed[row.request_id] = ERROR
            elif row.samples:
                several = self.depth == 0 and self.rng.random() < 0.01
                count = 2 if several else 1
                tokens = tuple(self.rng.choice([0, 2, 3, 4] * 5 + [STOP]) for _ in range(count))
                result.token_ids[row.request_id] = tokens
                self.seen["several"] += several
        return result

    def _note(self, events: Sequence[TokenEvent]) -> None:
        self.seen.update(event.finish_reason.name for event in events if event.finish_reason)


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_step_that_goes_on_is_as_if_every_request_was_asked(
    policy: str, depth: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken_in = count_taken_in(monkeypatch)
    seen: Counter[str] = Counter()
    for seed in range(16):
        rng = random.Random(f"{policy} {depth} {window} {seed}")
        pair = Pair(rng, policy, depth, window)
        for _ in range(150):
            if rng.random() < (0.3 if len(pair.quick.waiting) < 3 else 0.05):
                pair.add()
            if rng.random() < 0.03:
                pair.disturb()
            pair.step()
        seen += pair.seen + Counter(
            gone_on=pair.num_gone_on, preemptions=pair.quick.planner.num_preemptions
        )
    assert seen["gone_on"] > 200
    assert (taken_in.total() > 100) is (window is None)
    wanted = {"preemptions", "forks", "ABORT", "ERROR", "LENGTH", "STOP"}
    assert wanted | ({"several"} if depth == 0 else set()) <= seen.keys()


def test_forks_of_a_prompt_whose_last_token_came_alone_are_queued() -> None:
    driver = AheadDriver(make_limits(max_num_batched_tokens=4))
    driver.add(make_request("parent", range(5)), make_request("fork", range(5), fork_of="parent"))
    assert [shares(driver.launch()) for _ in range(2)] == [{"parent": 4}, {"parent": 1}]
    driver.land()
    assert shares(driver.launch()) == {"parent": 1}
    driver.land()  # of its first cohort
    assert shares(driver.launch()) == {"parent": 1, "fork": 1}
    driver.land()
    driver.run()
    assert driver.output["fork"] == solo_output(range(5), 8, next_by_hashing)


def count_taken_in(monkeypatch: pytest.MonkeyPatch) -> Counter[bool]:
    """How often a whole cohort goes on with what a step has brought."""
    counter: Counter[bool] = Counter()
    take_in: Callable[..., Sequence[TokenEvent] | None] = Cohort.take_in

    def counted(self: Cohort, *args: object) -> Sequence[TokenEvent] | None:
        events = take_in(self, *args)
        if events is not None:
            counter[True] += 1
        return events

    monkeypatch.setattr(Cohort, "take_in", counted)
    return counter
