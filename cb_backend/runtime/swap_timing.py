"""Times what a swapped block costs against a computed one. Engine thread, once, at load."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from cb_backend.core.sampling_params import SamplingParams
from cb_backend.core.step_io import (
    Admission,
    BlockCopy,
    CopyKind,
    ModelInfo,
    PendingStep,
    ScheduledRow,
    StepPlan,
    StepRows,
)
from cb_backend.core.swap_costs import SwapCosts

logger = logging.getLogger(__name__)

_MOST_BLOCKS = 16
_MOST_TOKENS = 128


class Timed(Protocol):
    """The parts of a model runner that are timed."""

    def launch(self, plan: StepPlan) -> PendingStep: ...

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None: ...


def measure_swap_costs(runner: Timed, info: ModelInfo, num_host_blocks: int) -> SwapCosts:
    """A copy of one block, one of many, and a step of many tokens, each the fastest of three."""
    many = min(info.num_blocks, num_host_blocks, _MOST_BLOCKS)
    one_s, many_s = _time_copies(runner, 1), _time_copies(runner, many)
    block_s = (many_s - one_s) / (many - 1) if many > 1 else one_s
    block_s = min(max(block_s, 0.0), one_s)
    costs = SwapCosts(one_s - block_s, block_s, _time_token(runner, info))
    logger.info("measured for the host tier: %s", costs)
    return costs


def _time_copies(runner: Timed, num_blocks: int) -> float:
    copies = [BlockCopy(CopyKind.IN, block, block) for block in range(num_blocks)]
    return _fastest(lambda: runner.copy_blocks(copies))


def _time_token(runner: Timed, info: ModelInfo) -> float:
    num_tokens = min(_MOST_TOKENS, info.max_model_len)
    blocks = tuple(range(-(-num_tokens // info.block_size)))
    params = SamplingParams(temperature=0.0, max_tokens=1)
    admission = Admission("measure", (0,) * num_tokens, num_tokens, 0, params, 0)
    # It samples, so that the answer is awaited on a device that works in the background.
    row = ScheduledRow("measure", 0, num_tokens, blocks, True)
    seconds = _fastest(
        lambda: runner.launch(StepPlan(0, (), (admission,), StepRows.of(row))).result()
    )
    runner.launch(StepPlan(0, ("measure",), ())).result()
    return seconds / num_tokens


def _fastest(work: Callable[[], object]) -> float:
    """Seconds of the fastest of three."""
    fastest = math.inf
    for _ in range(3):
        started = time.perf_counter()
        work()
        fastest = min(fastest, time.perf_counter() - started)
    return fastest
