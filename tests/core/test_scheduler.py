"""What the scheduler promises, step by step."""

from __future__ import annotations

import random

import pytest

from cb_backend.core.request import FinishReason, RequestStatus
from cb_backend.core.step_io import StepResult
from cb_backend.errors import ErrorInfo, InternalError, PromptTooLongError
from tests.core.driver import Driver, make_limits, shares
from tests.fakes import make_request, next_by_hashing, solo_output


def test_a_prompt_is_one_chunk_then_one_token_a_step() -> None:
    driver = Driver(make_limits())
    driver.add(make_request("a", range(10), max_tokens=3))
    plans = [driver.step() for _ in range(3)]
    assert [shares(plan) for plan in plans] == [{"a": 10}, {"a": 1}, {"a": 1}]
    assert driver.output["a"] == solo_output(range(10), 3, next_by_hashing)
    assert driver.ended == {"a": FinishReason.LENGTH}


def test_a_prompt_alone_takes_the_whole_budget_not_only_its_chunk() -> None:
    driver = Driver(make_limits(max_num_batched_tokens=32, max_prefill_chunk=16))
    driver.add(make_request("a", range(50), max_tokens=2))
    assert [shares(driver.step()) for _ in range(3)] == [{"a": 32}, {"a": 18}, {"a": 1}]


def test_partial_prefills_share_the_token_budget() -> None:
    driver = Driver(make_limits(max_num_batched_tokens=32, max_prefill_chunk=12))
    driver.add(*(make_request(name, range(i, i + 60)) for i, name in enumerate("abc")))
    assert shares(driver.step()) == {"a": 12, "b": 12, "c": 8}


def test_a_long_prompt_never_stops_a_stream() -> None:
    driver = Driver(make_limits(max_num_batched_tokens=8, max_prefill_chunk=8))
    driver.add(make_request("long1", range(60), max_tokens=1))
    driver.step()
    driver.add(make_request("long2", range(1, 61), max_tokens=1))
    driver.add(make_request("short", [5], max_tokens=6))
    while "short" not in driver.scheduler.running:
        driver.step()
    for _ in range(5):
        plan = driver.step()
        assert shares(plan)["short"] == 1
    driver.run()
    assert driver.output["short"] == solo_output([5], 6, next_by_hashing)


def test_a_request_joins_while_another_decodes_and_both_advance_in_the_same_steps() -> None:
    driver = Driver(make_limits())
    driver.add(make_request("first", range(5), max_tokens=40))
    for _ in range(4):
        driver.step()
    driver.add(make_request("second", range(20, 27), max_tokens=3))
    together = [driver.step() for _ in range(3)]
    assert [shares(plan) for plan in together] == [
        {"first": 1, "second": 7},
        {"first": 1, "second": 1},
        {"first": 1, "second": 1},
    ]
    assert driver.ended == {"second": FinishReason.LENGTH}


def test_seats_are_limited_and_given_in_order_of_arrival() -> None:
    driver = Driver(make_limits(max_num_seqs=2))
    driver.add(*(make_request(name, [1, 2], max_tokens=2) for name in "abcd"))
    driver.step()
    assert list(driver.scheduler.running) == ["a", "b"]
    driver.run()
    assert list(driver.ended) == ["a", "b", "c", "d"]


def test_a_stop_token_ends_the_request_and_is_reported() -> None:
    expected = solo_output([3, 4], 5, next_by_hashing)
    driver = Driver(make_limits())
    driver.add(make_request("a", [3, 4], max_tokens=9, stop_token_ids=[expected[2]]))
    driver.run()
    assert driver.output["a"] == expected[:3]
    assert driver.ended == {"a": FinishReason.STOP}


def test_a_stop_token_at_the_length_limit_is_a_stop() -> None:
    expected = solo_output([3, 4], 5, next_by_hashing)
    driver = Driver(make_limits())
    driver.add(make_request("a", [3, 4], max_tokens=3, stop_token_ids=[expected[2]]))
    driver.run()
    assert driver.ended == {"a": FinishReason.STOP}


def test_several_sampled_tokens_are_cut_at_the_stop_token() -> None:
    request = make_request("a", [1], max_tokens=10, stop_token_ids=[7])
    assert request.append_output((5, 6, 7, 8)) == ((5, 6, 7), FinishReason.STOP)
    assert request.token_ids == [1, 5, 6, 7]


def test_a_sampling_row_without_a_token_is_an_error_not_a_stall() -> None:
    driver = Driver(make_limits())
    driver.add(make_request("a", [1]))
    plan = driver.scheduler.schedule()
    with pytest.raises(InternalError, match="no token"):
        driver.scheduler.update(plan, StepResult(token_ids={"a": ()}, failed={}), now=0.0)


def test_a_request_that_an_empty_pool_cannot_hold_is_refused() -> None:
    driver = Driver(make_limits(num_blocks=4, block_size=4))
    driver.scheduler.add(make_request("fits", range(9), max_tokens=8))
    with pytest.raises(PromptTooLongError, match="need 5 KV blocks, the pool has 4"):
        driver.scheduler.add(make_request("not", range(9), max_tokens=9))
    driver.run()
    assert driver.ended == {"fits": FinishReason.LENGTH}


class TestPreemption:
    def test_the_newest_gives_way_and_its_output_does_not_change(self) -> None:
        driver = Driver(make_limits(num_blocks=9, block_size=4, enable_prefix_caching=False))
        prompts = {name: list(range(i, i + 6)) for i, name in enumerate("abc")}
        driver.add(*(make_request(name, p, max_tokens=16) for name, p in prompts.items()))
        driver.run()
        assert driver.scheduler.planner.num_preemptions > 0
        assert list(driver.ended) == ["a", "b", "c"]
        for name, prompt in prompts.items():
            assert driver.output[name] == solo_output(prompt, 16, next_by_hashing)

    def test_a_preempted_request_goes_before_those_that_never_ran(self) -> None:
        driver = Driver(make_limits(num_blocks=8, block_size=4, enable_prefix_caching=False))
        driver.add(make_request("a", range(8), max_tokens=20))
        driver.add(make_request("b", range(1, 9), max_tokens=20))
        while not driver.scheduler.planner.num_preemptions:
            driver.step()
        driver.add(make_request("late", [1], max_tokens=1))
        assert [r.status for r in driver.scheduler.waiting.in_order()] == [
            RequestStatus.PREEMPTED,
            RequestStatus.WAITING,
        ]
        driver.run()
        assert driver.output["b"] == solo_output(range(1, 9), 20, next_by_hashing)

    def test_a_preempted_request_finds_its_own_blocks_in_the_cache(self) -> None:
        driver = Driver(make_limits(num_blocks=10, block_size=4))
        driver.add(make_request("a", range(8), max_tokens=20))
        driver.add(make_request("b", range(50, 58), max_tokens=20))
        while not driver.scheduler.planner.num_preemptions:
            driver.step()
        request = next(iter(driver.scheduler.waiting))
        known = request.num_tokens
        while "b" not in driver.scheduler.running:
            driver.step()
        resumed = driver.executor.plans[-1].admitted[0]
        assert resumed.token_ids == tuple(request.token_ids[:known])
        assert 0 < resumed.num_computed_tokens < known
        assert request.num_cached_tokens == 0, "a client's cached tokens are those of its prompt"
        driver.run()
        assert driver.output["b"] == solo_output(range(50, 58), 20, next_by_hashing)

    def test_two_that_do_not_fit_together_do_not_preempt_each_other_for_ever(self) -> None:
        driver = Driver(make_limits(num_blocks=12, block_size=4, enable_prefix_caching=False))
        driver.add(make_request("a", range(20), max_tokens=20))
        driver.add(make_request("b", range(1, 21), max_tokens=20))
        driver.run()
        assert driver.scheduler.planner.num_preemptions <= 2


class TestPrefixCache:
    def test_a_repeated_prompt_computes_only_its_last_block(self) -> None:
        driver = Driver(make_limits())
        driver.add(make_request("cold", range(12), max_tokens=2))
        driver.run()
        driver.add(make_request("warm", range(12), max_tokens=2))
        assert shares(driver.step()) == {"warm": 4}
        driver.run()
        assert driver.cached == {"cold": 0, "warm": 8}
        assert driver.output["warm"] == driver.output["cold"]

    def test_generated_tokens_are_found_by_the_next_turn(self) -> None:
        driver = Driver(make_limits())
        driver.add(make_request("turn1", range(6), max_tokens=8))
        driver.run()
        history = [*range(6), *driver.output["turn1"], 900, 901]
        driver.add(make_request("turn2", history, max_tokens=2))
        driver.run()
        assert driver.cached["turn2"] == 12  # of 13 computed: full blocks only

    def test_a_prefix_is_shared_while_its_first_owner_still_runs(self) -> None:
        driver = Driver(make_limits())
        driver.add(make_request("a", range(12), max_tokens=20))
        driver.step()
        driver.add(make_request("b", [*range(8), 77], max_tokens=20))
        driver.step()
        a, b = driver.scheduler.running["a"], driver.scheduler.running["b"]
        assert a.block_table[:2] == b.block_table[:2]
        assert driver.scheduler.blocks.pool.ref_counts[a.block_table[0]] == 2
        driver.run()

    def test_another_salt_finds_nothing(self) -> None:
        driver = Driver(make_limits())
        driver.add(make_request("a", range(12), cache_salt="tenant-1"))
        driver.run()
        driver.add(make_request("b", range(12), cache_salt="tenant-2"))
        driver.run()
        assert driver.cached["b"] == 0

    def test_switched_off_it_finds_nothing(self) -> None:
        driver = Driver(make_limits(enable_prefix_caching=False))
        for name in "ab":
            driver.add(make_request(name, range(12)))
            driver.run()
        assert driver.cached == {"a": 0, "b": 0}
        assert not driver.scheduler.blocks.pool.cached_blocks


class TestEndings:
    @pytest.mark.parametrize("num_steps", [0, 1, 3])
    def test_an_abort_frees_the_blocks_at_once(self, num_steps: int) -> None:
        driver = Driver(make_limits(max_num_batched_tokens=8, max_prefill_chunk=8))
        driver.add(make_request("a", range(20), max_tokens=20))
        for _ in range(num_steps):
            driver.step()
        driver.abort("a")
        assert driver.ended == {"a": FinishReason.ABORT}
        assert driver.scheduler.blocks.pool.num_in_use == 0
        assert not driver.scheduler.has_work

    def test_an_abort_of_an_unknown_id_is_nothing(self) -> None:
        driver = Driver(make_limits())
        driver.abort("nobody")
        assert driver.ended == {}

    def test_the_executor_is_told_of_every_row_that_left(self) -> None:
        driver = Driver(make_limits())
        driver.add(make_request("a", [1], max_tokens=1), make_request("b", [1], max_tokens=5))
        driver.step()
        driver.abort("b")
        driver.add(make_request("c", [1], max_tokens=3))
        driver.step()
        assert driver.executor.batch == {"c"}

    def test_a_failed_step_ends_its_own_requests_only(self) -> None:
        driver = Driver(make_limits(max_num_seqs=1))
        driver.add(make_request("in", [1, 2]), make_request("out", [1, 2], max_tokens=2))
        plan = driver.scheduler.schedule()
        driver.take(driver.scheduler.fail(plan, ErrorInfo("request_failed", "boom"), now=0.0))
        assert driver.ended == {"in": FinishReason.ERROR}
        assert driver.scheduler.blocks.pool.num_in_use == 0
        driver.run()
        assert driver.output["out"] == solo_output([1, 2], 2, next_by_hashing)

    def test_a_row_that_fails_alone_ends_alone(self) -> None:
        driver = Driver(make_limits())
        driver.add(make_request("bad", [1, 2]), make_request("good", [1, 2], max_tokens=2))
        driver.executor.fail_rows = {"bad"}
        driver.run()
        assert driver.ended == {"bad": FinishReason.ERROR, "good": FinishReason.LENGTH}


@pytest.mark.parametrize("seed", range(60))
def test_a_random_walk_keeps_every_invariant_and_every_output(seed: int) -> None:
    """Random limits, arrivals, shared prefixes, salts and aborts; the executor checks the rest."""
    rng = random.Random(seed)
    block_size, max_num_seqs = rng.choice([1, 2, 4, 7]), rng.randint(1, 6)
    budget = rng.randint(max_num_seqs, 24)
    limits = make_limits(
        num_blocks=rng.randint(36 // block_size + 1, 120 // block_size),
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_prefill_chunk=rng.randint(1, budget),
        enable_prefix_caching=rng.random() < 0.7,
    )
    driver = Driver(limits)
    prefixes = [[rng.randrange(5) for _ in range(12)] for _ in range(2)]
    prompts: dict[str, list[int]] = {}
    lengths: dict[str, int] = {}
    for number in range(40):
        name = f"r{number}"
        prompts[name] = rng.choice(prefixes)[: rng.randint(1, 12)] + [
            rng.randrange(5) for _ in range(rng.randint(0, 8))
        ]
        lengths[name] = rng.randint(1, 16)
        salt = rng.choice(["", "x"])
        driver.add(make_request(name, prompts[name], max_tokens=lengths[name], cache_salt=salt))
        for _ in range(rng.randint(0, 4)):
            if driver.scheduler.has_work:
                driver.step()
        if rng.random() < 0.2:
            driver.abort(rng.choice(list(prompts)))
    driver.run()
    assert driver.ended.keys() == prompts.keys()
    for name, prompt in prompts.items():
        expected = solo_output(prompt, lengths[name], next_by_hashing)
        if driver.ended[name] is FinishReason.ABORT:
            expected = expected[: len(driver.output[name])]
        assert driver.output[name] == expected, name
    assert driver.scheduler.blocks.pool.num_in_use == 0
