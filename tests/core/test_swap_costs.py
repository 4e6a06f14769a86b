from __future__ import annotations

import pytest

from cb_backend.core.step_io import CopyKind
from cb_backend.core.swap_costs import SwapCosts
from tests.core.driver import Driver, make_limits
from tests.fakes import make_request


@pytest.mark.parametrize(
    ("costs", "num_blocks", "pays"),
    [
        (SwapCosts(0.0, 0.010, 0.001), 1, True),  # 10 ms against 16 tokens of 1 ms
        (SwapCosts(0.0, 0.017, 0.001), 1, False),
        (SwapCosts(0.0, 0.017, 0.001), 100, False),
        (SwapCosts(0.100, 0.010, 0.001), 1, False),  # the call alone costs more than one block
        (SwapCosts(0.100, 0.010, 0.001), 20, True),  # but not more than many
    ],
)
def test_copying_pays_when_it_is_faster_than_computing(
    costs: SwapCosts, num_blocks: int, pays: bool
) -> None:
    assert costs.copying_pays(num_blocks, block_size=16) is pays


@pytest.mark.parametrize(("copy_block_s", "copies_in"), [(0.001, True), (1.0, False)])
def test_a_prefix_on_the_host_is_computed_again_where_that_is_cheaper(
    copy_block_s: float, copies_in: bool
) -> None:
    costs = SwapCosts(0.0, copy_block_s, 0.01)
    driver = Driver(make_limits(num_blocks=6, block_size=4, num_host_blocks=8, swap_costs=costs))
    driver.add(make_request("first", range(16), max_tokens=2))
    driver.run()
    driver.add(make_request("crowd", range(100, 120), max_tokens=2))
    driver.run()
    driver.add(make_request("again", range(16), max_tokens=2))
    driver.run()
    kinds = {copy.kind for plan in driver.executor.plans for copy in plan.copies}
    assert (CopyKind.IN in kinds) is copies_in
    assert driver.output["again"] == driver.output["first"]
