"""An executor without a model, and requests for it."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence

from cb_backend.core.request import Request
from cb_backend.core.sampling_params import SamplingParams
from cb_backend.core.step_io import (
    FinishedStep,
    ModelInfo,
    PendingStep,
    PoolResize,
    StepPlan,
    StepResult,
)
from cb_backend.core.swap_costs import COPYING_IS_FREE

VOCAB_SIZE = 50_000
BLOCK_SIZE = 16
NUM_BLOCKS = 100_000
MAX_MODEL_LEN = 4096
NUM_TENANTS = 20
TOKEN = 7  # what every row samples


class CheapExecutor:
    """Costs as little as a device could cost the host."""

    def __init__(self, *, runs_ahead: bool = False) -> None:
        self._info = ModelInfo(
            model_name="cheap",
            vocab_size=VOCAB_SIZE,
            max_model_len=MAX_MODEL_LEN,
            eos_token_ids=(),
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            swap_costs=COPYING_IS_FREE,
            bytes_per_block=1,
            window=None,
            device="none",
            dtype="none",
            attention="none",
            implementation="native",
            runs_ahead=runs_ahead,
        )

    @property
    def model_info(self) -> ModelInfo:
        return self._info

    def launch(self, plan: StepPlan) -> PendingStep:
        tokens = {row.request_id: (TOKEN,) for row in plan.rows if row.samples}
        return FinishedStep(StepResult(tokens, {}))

    def resize(self, change: PoolResize) -> None:
        raise NotImplementedError

    def free_bytes(self) -> int:
        return 0

    def save_blocks(self, path: str, blocks: Mapping[bytes, int]) -> None:
        raise NotImplementedError

    def saved_digests(self, path: str) -> list[bytes]:
        return []

    def load_blocks(self, path: str, places: Sequence[tuple[int, int]]) -> None:
        raise NotImplementedError

    def close(self) -> None:
        return


def make_request(number: int, rng: random.Random, num_prompt: int, max_tokens: int) -> Request:
    return Request(
        request_id=f"{number:032x}",
        token_ids=[rng.randrange(VOCAB_SIZE) for _ in range(num_prompt)],
        num_prompt_tokens=num_prompt,
        params=SamplingParams(),
        max_tokens=max_tokens,
        stop_token_ids=frozenset(),
        seed=0,
        arrival_time=float(number),
        tenant=f"tenant {number % NUM_TENANTS}",
        priority=number % 3,
        deadline=math.inf if number % 4 else 1e6 + number,
    )
