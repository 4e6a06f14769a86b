"""Several choices of one prompt: one prefill, shared blocks, a copy of the last."""

from __future__ import annotations

import pytest

from cb_backend.core.request import FinishReason
from cb_backend.core.step_io import CopyKind
from tests.core.driver import Driver, make_limits, shares
from tests.fakes import make_request, next_by_hashing, solo_output


def add_choices(driver: Driver, prompt: range, num_choices: int, max_tokens: int = 6) -> None:
    driver.add(make_request("p", prompt, max_tokens=max_tokens))
    for number in range(1, num_choices):
        driver.add(make_request(f"p.{number}", prompt, max_tokens=max_tokens, fork_of="p"))


@pytest.mark.parametrize("length", [1, 4, 5, 8, 9, 11])
@pytest.mark.parametrize("caching", [True, False])
def test_the_prompt_is_computed_once_and_every_choice_is_whole(length: int, caching: bool) -> None:
    driver = Driver(make_limits(enable_prefix_caching=caching))
    add_choices(driver, range(length), 3)
    first = driver.step()
    assert shares(first) == {"p": length}
    assert shares(driver.step()) == {"p": 1, "p.1": 1, "p.2": 1}
    driver.run()
    for name in ("p", "p.1", "p.2"):
        assert driver.output[name] == solo_output(range(length), 6, next_by_hashing)
        assert driver.ended[name] is FinishReason.LENGTH


def test_full_blocks_are_shared_and_the_last_one_is_copied() -> None:
    driver = Driver(make_limits(block_size=4))
    add_choices(driver, range(10), 2)
    driver.step()
    plan = driver.step()
    parent, fork = driver.scheduler.running["p"], driver.scheduler.running["p.1"]
    assert parent.block_table[:2] == fork.block_table[:2]
    assert parent.block_table[2] != fork.block_table[2]
    assert [(c.kind, c.source, c.target) for c in plan.copies] == [
        (CopyKind.FORK, parent.block_table[2], fork.block_table[2])
    ]


def test_a_long_prompt_keeps_its_forks_out_of_the_way_of_others() -> None:
    driver = Driver(make_limits(max_num_batched_tokens=8, max_prefill_chunk=4))
    add_choices(driver, range(40), 2)
    driver.step()
    driver.add(make_request("other", [5], max_tokens=2))
    driver.step()
    assert "other" in driver.scheduler.running
    driver.run()
    assert driver.output["p.1"] == driver.output["p"]


@pytest.mark.parametrize("steps_before", [0, 1, 2, 3])
def test_choices_outlive_an_abort_of_the_first(steps_before: int) -> None:
    driver = Driver(make_limits(max_num_batched_tokens=8, max_prefill_chunk=8))
    add_choices(driver, range(10), 3)
    for _ in range(steps_before):
        driver.step()
    driver.abort("p")
    driver.run()
    for name in ("p.1", "p.2"):
        assert driver.output[name] == solo_output(range(10), 6, next_by_hashing)


@pytest.mark.parametrize("steps_before", [0, 1, 2])
def test_an_aborted_fork_leaves_the_others_alone(steps_before: int) -> None:
    driver = Driver(make_limits())
    add_choices(driver, range(10), 3)
    for _ in range(steps_before):
        driver.step()
    driver.abort("p.1")
    driver.run()
    assert driver.ended["p.1"] is FinishReason.ABORT
    for name in ("p", "p.2"):
        assert driver.output[name] == solo_output(range(10), 6, next_by_hashing)


def test_choices_that_must_preempt_each_other_all_finish() -> None:
    driver = Driver(make_limits(num_blocks=10, block_size=4))
    add_choices(driver, range(6), 5, max_tokens=20)
    driver.run()
    assert driver.scheduler.planner.num_preemptions > 0
    for name in ("p", "p.1", "p.2", "p.3", "p.4"):
        assert driver.output[name] == solo_output(range(6), 20, next_by_hashing)
