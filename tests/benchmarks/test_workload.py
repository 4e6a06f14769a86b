from __future__ import annotations

import pytest
from workload import WORKLOADS, long_prompts, requests_of, shared_prefix, workload


def test_the_mixed_workload_is_the_one_whose_figures_are_known() -> None:
    requests = workload()
    assert len(requests) == 64
    assert sum(len(prompt) for prompt, _ in requests) == 9204
    assert sum(count for _, count in requests) == 6897


@pytest.mark.parametrize("name", WORKLOADS)
def test_more_requests_begin_with_the_same_ones(name: str) -> None:
    assert requests_of(name, 8192, 8)[:4] == requests_of(name, 8192, 4)


@pytest.mark.parametrize("max_model_len", [512, 2048, 8192])
def test_long_prompts_fit_with_their_output(max_model_len: int) -> None:
    lengths = {len(prompt) for prompt, _ in long_prompts(max_model_len)}
    assert lengths == {min(4000, max_model_len - 64)}
    assert all(
        len(prompt) + count <= max_model_len for prompt, count in long_prompts(max_model_len)
    )


def test_prompts_share_their_first_thousand_tokens_and_no_more() -> None:
    prompts = [prompt for prompt, _ in shared_prefix()]
    assert len({tuple(prompt[:1000]) for prompt in prompts}) == 1
    assert len({prompt[1000] for prompt in prompts}) > 1
