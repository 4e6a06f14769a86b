"""Fakes that reveal disorder: an executor without a model that checks what the scheduler does."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from cb_backend.core.request import Request
from cb_backend.core.sampling_params import SamplingParams
from cb_backend.core.step_io import (
    BlockCopy,
    CopyKind,
    FinishedStep,
    ModelInfo,
    PendingStep,
    PoolResize,
    ScheduledRow,
    StepPlan,
    StepResult,
)
from cb_backend.core.swap_costs import COPYING_IS_FREE
from cb_backend.errors import ErrorInfo

VOCAB_SIZE = 1000
POISON = (-7, -7)
NO_TOKEN = -9  # what logits that are not finite give


def make_model_info(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    max_model_len: int | None = None,
    eos_token_ids: tuple[int, ...] = (),
    window: int | None = None,
    runs_ahead: bool = False,
) -> ModelInfo:
    return ModelInfo(
        model_name="fake",
        vocab_size=VOCAB_SIZE,
        max_model_len=max_model_len or num_blocks * block_size,
        eos_token_ids=eos_token_ids,
        num_blocks=num_blocks,
        block_size=block_size,
        swap_costs=COPYING_IS_FREE,
        bytes_per_block=block_size * 8,
        window=window,
        device="fake",
        dtype="int64",
        attention="fake",
        implementation="native",
        runs_ahead=runs_ahead,
    )


def next_by_counting(token_ids: Sequence[int]) -> int:
    """Last token + 1, so that a lost, repeated or swapped token shows in the output."""
    return (token_ids[-1] + 1) % VOCAB_SIZE


def next_by_hashing(token_ids: Sequence[int]) -> int:
    """Depends on every token before it, so that reading one wrong slot changes all that follows."""
    state = 17
    for token_id in token_ids:
        state = _chain(state, token_id)
    return state % VOCAB_SIZE


@dataclass(slots=True)
class _Row:
    token_ids: list[int]
    block_table: list[int] = field(default_factory=list)


class ShadowExecutor:
    """Keeps token ids where a model would keep K and V, and reads them back for the next token.

    As K and V do, a slot also depends on everything before it: it holds a chain over the prefix,
    computed from the slot before, read through the block table. Any fault of paging, sharing,
    preemption or retirement therefore changes the output or raises.
    Running ahead, it computes nothing before its result is asked for, as a slow device would.
    `before_step` may raise or block, to play a device that does, and `before_launch` a driver;
    `fail_rows` names rows that fail alone.
    """

    def __init__(
        self,
        info: ModelInfo | None = None,
        *,
        next_token: Callable[[Sequence[int]], int] = next_by_counting,
        before_step: Callable[[StepPlan], None] = lambda plan: None,
        before_launch: Callable[[StepPlan], None] = lambda plan: None,
        num_host_blocks: int = 0,
    ) -> None:
        self.info = info or make_model_info()
        self.plans: list[StepPlan] = []  # that were begun
        self.launched: deque[StepPlan] = deque()  # and not begun
        self.fail_rows: set[str] = set()
        self.free = 2**40  # bytes
        self.idle_pieces = 0  # of what is to be done in idle time
        self.resizes: list[PoolResize] = []
        self.saved: dict[str, dict[bytes, list[tuple[int, int]]]] = {}  # by path, for all runs
        self.closed = threading.Event()
        self.helped: Callable[[StepPlan], None] = lambda plan: None
        self._next_token = next_token
        self._before_step = before_step
        self._before_launch = before_launch
        self._rows: dict[str, _Row] = {}
        self._fallen: list[StepPlan] = []  # whose launch failed; the next one swaps their rows
        self._cache = [
            [POISON] * self.info.block_size for _ in range(self.info.num_blocks)
        ]  # [N, block_size] of (token id, chain)
        self._host = [[POISON] * self.info.block_size for _ in range(num_host_blocks)]

    @property
    def model_info(self) -> ModelInfo:
        return self.info

    @property
    def batch(self) -> set[str]:
        return set(self._rows)

    def launch(self, plan: StepPlan) -> PendingStep:
        while self._fallen:
            assert not self.launched, "a step in flight when a launch had failed"
            self._swap_rows(self._fallen.pop(0))
        try:
            self._before_launch(plan)
        except Exception:
            self._fallen.append(plan)
            raise
        if self.info.runs_ahead:
            self.launched.append(plan)
            return _LaunchedStep(self, plan)
        return FinishedStep(self.compute(plan))

    def compute(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        self._swap_rows(plan)
        self._before_step(plan)
        for copy in plan.copies:
            self._copy(copy)
        result = StepResult(token_ids={}, failed={})
        for row in plan.rows:
            self._extend(row)
        for row in plan.rows:
            self._write(row)
        for row in plan.rows:
            if row.request_id in self.fail_rows:
                if row.samples:
                    self._rows[row.request_id].token_ids.append(NO_TOKEN)
                result.failed[row.request_id] = ErrorInfo("request_failed", "told to fail")
            elif row.samples:
                result.token_ids[row.request_id] = (self._sample(row),)
        return result

    def resize(self, change: PoolResize) -> None:
        assert not self.launched, "blocks move under a step in flight"
        self.resizes.append(change)
        for copy in change.copies:
            self._copy(copy)
        size = self.info.block_size
        grown = [[POISON] * size for _ in range(change.num_blocks - len(self._cache))]
        self._cache = self._cache[: change.num_blocks] + grown
        for row in self._rows.values():
            row.block_table = [change.moved.get(b, b) for b in row.block_table]

    def free_bytes(self) -> int:
        return self.free

    def use_idle_time(self) -> bool:
        assert not self.launched, "the device is not idle"
        self.idle_pieces -= 1
        return self.idle_pieces >= 0

    def save_blocks(self, path: str, blocks: Mapping[bytes, int]) -> None:
        self.saved[path] = {digest: list(self._cache[b]) for digest, b in blocks.items()}

    def saved_digests(self, path: str) -> list[bytes]:
        return list(self.saved.get(path, ()))

    def load_blocks(self, path: str, places: Sequence[tuple[int, int]]) -> None:
        contents = list(self.saved[path].values()) if places else []
        for position, block_id in places:
            self._cache[block_id] = list(contents[position])

    def close(self) -> None:
        self.closed.set()

    def _swap_rows(self, plan: StepPlan) -> None:
        for request_id in plan.retired:
            self._rows.pop(request_id, None)
        for admission in plan.admitted:
            self._rows[admission.request_id] = _Row(list(admission.token_ids))

    def _copy(self, copy: BlockCopy) -> None:
        source = self._host if copy.kind is CopyKind.IN else self._cache
        target = self._host if copy.kind is CopyKind.OUT else self._cache
        target[copy.target] = list(source[copy.source])

    def _extend(self, scheduled: ScheduledRow) -> None:
        self._rows[scheduled.request_id].block_table.extend(scheduled.new_block_ids)

    def _write(self, scheduled: ScheduledRow) -> None:
        row, start = self._rows[scheduled.request_id], scheduled.num_computed_tokens
        for position in range(start, start + scheduled.num_scheduled_tokens):
            before = self._read(row, position - 1)[1] if position else 0
            token_id = row.token_ids[position]
            block_id = row.block_table[position // self.info.block_size]
            slot = (token_id, _chain(before, token_id))
            self._cache[block_id][position % self.info.block_size] = slot

    def _read(self, row: _Row, position: int) -> tuple[int, int]:
        block_id = row.block_table[position // self.info.block_size]
        return self._cache[block_id][position % self.info.block_size]

    def _sample(self, scheduled: ScheduledRow) -> int:
        row = self._rows[scheduled.request_id]
        end = scheduled.num_computed_tokens + scheduled.num_scheduled_tokens
        assert end == len(row.token_ids), f"{scheduled} samples before its last known token"
        first = 0 if self.info.window is None else max(0, end - self.info.window)
        gathered = [self._read(row, position) for position in range(first, end)]
        token_id = self._next_token([token_id for token_id, _ in gathered])
        if not _is_one_chain(gathered):
            token_id = (token_id + 1) % VOCAB_SIZE  # what attention over foreign K and V gives
        row.token_ids.append(token_id)
        return token_id


@dataclass(frozen=True, slots=True)
class _LaunchedStep:
    executor: ShadowExecutor
    plan: StepPlan

    def help(self) -> None:
        self.executor.helped(self.plan)

    def result(self) -> StepResult:
        assert self.executor.launched.popleft() is self.plan, "results are asked for out of order"
        return self.executor.compute(self.plan)


def _chain(before: int, token_id: int) -> int:
    return (before * 1_000_003 + token_id + 1) % 2_147_483_647


def _is_one_chain(gathered: Sequence[tuple[int, int]]) -> bool:
    """Whether each slot follows the one before it."""
    return all(
        stored == _chain(before, token_id) for (_, before), (token_id, stored) in pairwise(gathered)
    )


def solo_output(
    prompt: Sequence[int],
    num_tokens: int,
    next_token: Callable[[Sequence[int]], int] = next_by_counting,
    window: int | None = None,
) -> list[int]:
    """What a request must bring, whoever shares its steps."""
    token_ids = list(prompt)
    for _ in range(num_tokens):
        token_ids.append(next_token(token_ids if window is None else token_ids[-window:]))
    return token_ids[len(prompt) :]


def make_request(
    request_id: str,
    prompt: Sequence[int],
    *,
    max_tokens: int = 8,
    stop_token_ids: Sequence[int] = (),
    cache_salt: str = "",
    priority: int = 0,
    tenant: str = "",
    deadline: float = math.inf,
    arrival_time: float = 0.0,
    fork_of: str | None = None,
    pin_s: float = 0.0,
) -> Request:
    return Request(
        request_id=request_id,
        token_ids=list(prompt),
        num_prompt_tokens=len(prompt),
        params=SamplingParams(temperature=0.0, max_tokens=max_tokens),
        max_tokens=max_tokens,
        stop_token_ids=frozenset(stop_token_ids),
        seed=0,
        arrival_time=arrival_time,
        cache_salt=cache_salt,
        priority=priority,
        tenant=tenant,
        deadline=deadline,
        fork_of=fork_of,
        pin_s=pin_s,
    )
