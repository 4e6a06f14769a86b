"""What each policy promises, on a scheduler that steps by hand."""

from __future__ import annotations

import random

import pytest

from cb_backend.config import EngineConfig
from cb_backend.core.policies import (
    POLICIES,
    DeadlinePolicy,
    FairPolicy,
    Key,
    Policy,
    PriorityPolicy,
    policy_of,
)
from cb_backend.core.request import Request
from cb_backend.errors import ConfigError
from tests.core.driver import Driver, make_limits, shares
from tests.fakes import make_request, next_by_hashing, solo_output


def test_an_unknown_policy_is_refused_with_the_names_of_those_that_exist() -> None:
    with pytest.raises(
        ConfigError, match="deadline, fair, fcfs, priority or module:Class, got 'lifo'"
    ):
        policy_of(EngineConfig(model="m"), "lifo")


def test_every_policy_goes_by_the_name_it_is_registered_under() -> None:
    for name in POLICIES:
        assert policy_of(EngineConfig(model="m"), name).name == name


class TestPriority:
    def test_a_higher_priority_goes_first(self) -> None:
        driver = Driver(make_limits(max_num_seqs=1), PriorityPolicy(ageing_s=10.0))
        for name, priority in [("low", 0), ("high", 3), ("middle", 1)]:
            driver.add(make_request(name, [1], max_tokens=2, priority=priority))
        driver.run()
        assert list(driver.ended) == ["high", "middle", "low"]

    def test_an_urgent_request_takes_the_seat_of_the_least_urgent_one(self) -> None:
        driver = Driver(make_limits(max_num_seqs=2), PriorityPolicy(ageing_s=10.0))
        driver.add(make_request("a", [1], max_tokens=20, priority=1))
        driver.add(make_request("b", [2], max_tokens=20, priority=0))
        driver.step()
        driver.add(make_request("urgent", [3], max_tokens=2, priority=5))
        assert shares(driver.step()).keys() == {"a", "urgent"}
        driver.run()
        assert driver.output["b"] == solo_output([2], 20, next_by_hashing)

    def test_an_urgent_request_takes_blocks_of_a_running_one(self) -> None:
        driver = Driver(make_limits(num_blocks=8, block_size=4), PriorityPolicy(ageing_s=10.0))
        driver.add(make_request("low", range(20), max_tokens=8, priority=0))
        driver.step()
        driver.add(make_request("urgent", range(50, 66), max_tokens=4, priority=1))
        assert shares(driver.step()).keys() == {"urgent"}
        driver.run()
        assert driver.output["low"] == solo_output(range(20), 8, next_by_hashing)

    def test_equal_priorities_never_throw_each_other_out(self) -> None:
        driver = Driver(make_limits(max_num_seqs=1), PriorityPolicy(ageing_s=10.0))
        driver.add(make_request("a", [1], max_tokens=9, priority=1))
        driver.step()
        driver.add(make_request("b", [1], max_tokens=1, priority=1))
        driver.run()
        assert list(driver.ended) == ["a", "b"]
        assert driver.scheduler.planner.num_preemptions == 0

    @pytest.mark.parametrize(("later_by", "first"), [(29.0, "high"), (31.0, "low")])
    def test_the_bound_on_waiting_is_the_difference_of_levels_times_the_ageing(
        self, later_by: float, first: str
    ) -> None:
        """Three levels of ten seconds: who comes 30 s later no longer passes."""
        driver = Driver(make_limits(max_num_seqs=1), PriorityPolicy(ageing_s=10.0))
        driver.add(make_request("running", [1], max_tokens=3, priority=9))
        driver.step()
        driver.add(make_request("low", [1], max_tokens=1, arrival_time=100.0))
        driver.add(
            make_request("high", [1], max_tokens=1, priority=3, arrival_time=100.0 + later_by)
        )
        driver.run()
        assert list(driver.ended)[1] == first

    def test_a_stream_of_urgent_work_does_not_starve_the_rest(self) -> None:
        driver = Driver(make_limits(max_num_seqs=1), PriorityPolicy(ageing_s=5.0))
        driver.add(make_request("low", [1], max_tokens=2, arrival_time=0.0))
        for second in range(200):
            name = f"urgent{second}"
            driver.add(
                make_request(name, [1], max_tokens=1, priority=4, arrival_time=float(second))
            )
            driver.step()
            if "low" in driver.ended:
                break
        assert second <= 4 * 5.0 + 3


class TestDeadline:
    def test_the_earliest_deadline_goes_first_and_none_last(self) -> None:
        driver = Driver(make_limits(max_num_seqs=1), DeadlinePolicy())
        driver.add(make_request("whenever", [1], max_tokens=1))
        driver.add(make_request("later", [1], max_tokens=1, deadline=9.0))
        driver.add(make_request("soon", [1], max_tokens=1, deadline=5.0))
        driver.run()
        assert list(driver.ended) == ["soon", "later", "whenever"]

    def test_an_earlier_deadline_takes_the_seat_of_a_later_one(self) -> None:
        driver = Driver(make_limits(max_num_seqs=1), DeadlinePolicy())
        driver.add(make_request("later", [1], max_tokens=9, deadline=9.0))
        driver.step()
        driver.add(make_request("soon", [1], max_tokens=1, deadline=5.0))
        driver.run()
        assert list(driver.ended) == ["soon", "later"]


def service(driver: Driver, tenant: str) -> float:
    """Tokens served so far to a tenant whose requests are named after it."""
    return sum(len(tokens) for name, tokens in driver.output.items() if name.startswith(tenant))


class TestFair:
    def run_two(self, weights: dict[str, float], num_steps: int) -> Driver:
        """a floods, b always has two that wait."""
        driver = Driver(
            make_limits(max_num_seqs=2, num_blocks=256, enable_prefix_caching=False),
            FairPolicy(weights),
        )
        for number in range(200):
            driver.add(make_request(f"a{number}", [1, number], max_tokens=10, tenant="a"))
        for step in range(num_steps):
            waiting = sum(request.tenant == "b" for request in driver.scheduler.waiting)
            for number in range(waiting, 2):
                name = f"b{step}.{number}"
                driver.add(make_request(name, [2, step], max_tokens=10, tenant="b"))
            driver.step()
        return driver

    def test_a_flood_of_one_tenant_leaves_the_other_its_half(self) -> None:
        driver = self.run_two({}, 400)
        assert service(driver, "b") == pytest.approx(service(driver, "a"), rel=0.1)

    def test_weights_divide_the_service(self) -> None:
        driver = self.run_two({"a": 1.0, "b": 3.0}, 400)
        assert service(driver, "b") == pytest.approx(3 * service(driver, "a"), rel=0.15)

    def test_idle_time_cannot_be_saved_up(self) -> None:
        driver = Driver(make_limits(max_num_seqs=1, num_blocks=256), FairPolicy({}))
        for number in range(100):
            driver.add(make_request(f"a{number}", [1, number], max_tokens=10, tenant="a"))
        for _ in range(300):
            driver.step()
        before = service(driver, "a")
        for number in range(50):
            driver.add(make_request(f"b{number}", [2, number], max_tokens=10, tenant="b"))
        for _ in range(200):
            driver.step()
        assert service(driver, "b") <= service(driver, "a") - before + 2 * 12

    def test_leaving_for_a_moment_does_not_clear_a_debt(self) -> None:
        policy = FairPolicy({})
        policy.activated("a", [])
        policy.activated("b", ["a"])
        policy.charged(make_request("r", range(100), tenant="a"), 100, 0)
        policy.activated("a", ["b"])
        assert policy.counters["a"] > policy.counters["b"]

    def test_cached_tokens_cost_less_and_output_more_than_the_prompt(self) -> None:
        def cost(num_computed: int, num_cached: int, num_charged: int = 0) -> float:
            policy = FairPolicy({})
            policy.activated("t", [])
            request = make_request("r", range(10), tenant="t")
            request.num_charged = num_charged
            policy.charged(request, num_computed, num_cached)
            return policy.counters["t"]

        assert cost(0, 10) < cost(10, 0) < cost(10, 0, num_charged=10)

    def test_tenants_that_are_gone_and_owe_nothing_are_forgotten(self) -> None:
        policy = FairPolicy({})
        policy.activated("busy", [])
        policy.charged(make_request("r", range(10), tenant="busy"), 10, 0)
        for number in range(1000):
            policy.activated(f"passer-by {number}", ["busy"])
        assert len(policy.counters) < 5


class ShortestPromptFirst(Policy):
    """What a user would write."""

    name = "shortest"

    def key(self, request: Request) -> Key:
        return (request.num_prompt_tokens, request.sequence)


def test_a_policy_of_ones_own_is_one_small_class() -> None:
    driver = Driver(make_limits(max_num_seqs=1), ShortestPromptFirst())
    for length in (5, 2, 9, 1):
        driver.add(make_request(f"p{length}", range(length), max_tokens=2))
    driver.run()
    assert list(driver.ended) == ["p1", "p2", "p5", "p9"]


def test_a_policy_of_ones_own_is_configured_by_its_place() -> None:
    config = EngineConfig(model="m", policy=f"{__name__}:ShortestPromptFirst")
    assert isinstance(policy_of(config, config.policy), ShortestPromptFirst)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("no_such_module:Policy", "No module named"),
        (f"{__name__}:NoSuchPolicy", "has no attribute"),
        ("cb_backend.core.policies:PriorityPolicy", "missing 1 required positional argument"),
        ("collections:Counter", "must be a subclass of cb_backend.core.policies.Policy"),
        ("os:abort", "must be a subclass of cb_backend.core.policies.Policy"),
        (":", "cannot be made"),
    ],
)
def test_a_policy_that_cannot_be_made_is_refused_with_the_reason(name: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        policy_of(EngineConfig(model="m"), name)


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_changing_to_a_policy_at_run_time_orders_anew_and_loses_nothing(name: str) -> None:
    driver, rng = Driver(make_limits(max_num_seqs=2)), random.Random(name)
    prompts = {f"r{n}": [rng.randrange(9) for _ in range(rng.randint(1, 9))] for n in range(12)}
    for request_id, prompt in prompts.items():
        driver.add(
            make_request(
                request_id,
                prompt,
                max_tokens=6,
                priority=rng.randint(0, 3),
                tenant=rng.choice("xyz"),
                deadline=rng.uniform(0, 99),
            )
        )
    driver.step()
    driver.scheduler.roster.use(policy_of(EngineConfig(model="m"), name))
    driver.run()
    for request_id, prompt in prompts.items():
        assert driver.output[request_id] == solo_output(prompt, 6, next_by_hashing)


class Moody(Policy):
    """Fails on the second request that it is asked about."""

    name = "moody"

    def __init__(self) -> None:
        self.num_asked = 0

    def key(self, request: Request) -> Key:
        self.num_asked += 1
        if self.num_asked == 3:
            raise ValueError("no")
        return super().key(request)


def test_a_policy_that_fails_while_it_takes_over_loses_nobody() -> None:
    driver = Driver(make_limits(max_num_seqs=1))
    for number in range(5):
        driver.add(make_request(f"r{number}", [number], max_tokens=2))
    driver.step()
    with pytest.raises(ValueError, match="no"):
        driver.scheduler.roster.use(Moody())
    assert driver.scheduler.roster.policy.name == "fcfs"
    driver.run()
    assert list(driver.ended) == [f"r{number}" for number in range(5)]
