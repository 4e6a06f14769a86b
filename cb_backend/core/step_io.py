"""What passes between the scheduler and the executor, and what a step tells the outside.

Everything here is plain, frozen data: a plan can be written down, replayed, or sent to another
rank. A plan carries what changed, not the whole batch: the executor keeps a persistent batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import repeat
from typing import NamedTuple, Protocol, overload

from cb_backend.core.request import FinishReason, RequestCost
from cb_backend.core.sampling_params import SamplingParams
from cb_backend.core.swap_costs import SwapCosts
from cb_backend.errors import ErrorInfo


@dataclass(frozen=True, slots=True)
class Admission:
    """A request that joins the batch in this step, new or resumed after preemption."""

    request_id: str
    token_ids: tuple[int, ...]  # all known tokens: prompt and, when resumed, output so far
    num_prompt_tokens: int
    num_computed_tokens: int  # leading tokens whose K and V already lie in the row's blocks
    params: SamplingParams
    seed: int


class ScheduledRow(NamedTuple):
    """One request's share of the step: its next `num_scheduled_tokens` tokens.

    The executor knows which tokens these are: it has the admission's and those it sampled since.
    """

    request_id: str
    num_computed_tokens: int  # before this step, and after those that are in flight
    num_scheduled_tokens: int
    new_block_ids: tuple[int, ...]  # appended to the row's block table, which an admission empties
    samples: bool  # the step reaches the last known token, so its logits give the next one


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of a step, field by field: there are hundreds, and who is in a hurry wants one field
    of all of them. Iterate for the rows themselves."""

    request_ids: tuple[str, ...] = ()
    num_computed_tokens: tuple[int, ...] = ()
    num_scheduled_tokens: tuple[int, ...] = ()
    new_block_ids: tuple[tuple[int, ...], ...] = ()
    samples: tuple[bool, ...] = ()

    @classmethod
    def of(cls, *rows: ScheduledRow) -> StepRows:
        return cls(*zip(*rows, strict=True))

    def __len__(self) -> int:
        return len(self.request_ids)

    def __iter__(self) -> Iterator[ScheduledRow]:
        return map(
            ScheduledRow,
            self.request_ids,
            self.num_computed_tokens,
            self.num_scheduled_tokens,
            self.new_block_ids,
            self.samples,
        )


class CopyKind(StrEnum):
    FORK = "fork"  # device block to device block: copy-on-write
    OUT = "out"  # device block to host block
    IN = "in"  # host block to device block


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """All layers, K and V, of one block."""

    kind: CopyKind
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class PoolResize:
    """A new size of the KV pool. Carried out between two steps: copy, cut or extend, rename."""

    num_blocks: int
    copies: tuple[BlockCopy, ...]
    moved: dict[int, int]  # block ids in every row's table that now have another


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Applied in this order: retire, admit, extend block tables, copy blocks one after the other,
    one ragged forward, sample."""

    step: int
    retired: tuple[str, ...]  # leave the batch: finished, aborted, preempted or failed
    admitted: tuple[Admission, ...]  # each also has a row
    rows: StepRows = StepRows()  # in the order of the policy
    copies: tuple[BlockCopy, ...] = ()  # a later one may depend on an earlier one
    num_tokens: int = field(init=False)  # of all rows

    def __post_init__(self) -> None:
        num_tokens = sum(self.rows.num_scheduled_tokens)
        object.__setattr__(self, "num_tokens", num_tokens)  # it is frozen


@dataclass(frozen=True, slots=True)
class StepResult:
    """New tokens of each sampling row, by request id; a row that failed alone is in `failed`.

    A row may bring several tokens (speculation); it is never missing silently: every row with
    `samples` is in exactly one of the two.
    """

    token_ids: dict[str, tuple[int, ...]]
    failed: dict[str, ErrorInfo]


class TokenEvent(NamedTuple):  # a tuple: a step makes hundreds, see `events_of`
    """What one step gave one request. Exactly one event of a request has a `finish_reason`."""

    request_id: str
    token_ids: tuple[int, ...]
    step: int
    time: float  # seconds, the engine's monotonic clock, at the end of the step
    num_cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    error: ErrorInfo | None = None  # set exactly when finish_reason is ERROR
    cost: RequestCost | None = None  # set with the finish_reason of a request that was queued


@dataclass(frozen=True, slots=True)
class NextTokens(Sequence[TokenEvent]):
    """The events of requests that all got a token and go on, field by field: they need not be made
    before somebody looks at one. Iterate for the events themselves."""

    request_ids: tuple[str, ...]
    token_ids: Sequence[tuple[int, ...]]  # of each
    step: int
    time: float
    num_cached_tokens: tuple[int, ...]  # of each

    def __len__(self) -> int:
        return len(self.request_ids)

    def __iter__(self) -> Iterator[TokenEvent]:
        steps, times, nothing = repeat(self.step), repeat(self.time), repeat(None)
        columns = (self.request_ids, self.token_ids, steps, times, self.num_cached_tokens)
        return iter(events_of(zip(*columns, *repeat(nothing, 3), strict=False)))

    @overload
    def __getitem__(self, index: int) -> TokenEvent: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[TokenEvent]: ...
    def __getitem__(self, index: int | slice) -> TokenEvent | Sequence[TokenEvent]:
        return list(self)[index]


def events_of(fields: Iterable[tuple[object, ...]]) -> list[TokenEvent]:
    """Of all fields of each, in half the time."""
    return list(map(tuple.__new__, repeat(TokenEvent), fields))


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Facts of the loaded model and its cache, found at start and never configured."""

    model_name: str
    vocab_size: int
    max_model_len: int  # tokens; the smallest of config, model and what the KV pool holds
    eos_token_ids: tuple[int, ...]
    num_blocks: int
    block_size: int  # tokens per KV block
    swap_costs: SwapCosts  # measured where there is a host tier
    bytes_per_block: int  # over all layers, K and V
    window: int | None  # tokens that the widest attention reaches back; None: to the first
    device: str
    dtype: str
    attention: str  # the attention path that was chosen
    implementation: str  # "native" or "transformers"
    runs_ahead: bool  # whether a step is worth launching before the one before it has ended


class PendingStep(Protocol):
    """A step that was launched."""

    def help(self) -> None:
        """Take part in computing it, where the host can, until its end is near. Raises nothing."""
        ...

    def result(self) -> StepResult:
        """Wait for it: the one synchronization with the device. Asked once, in the order of the
        steps. May raise: the requests of the plan then fail, and those of the plan launched behind
        it."""
        ...


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """Of an executor that computes as it launches."""

    outcome: StepResult

    def help(self) -> None:
        pass

    def result(self) -> StepResult:
        return self.outcome


class Executor(Protocol):
    """Runs the model. Lives on the engine thread; built there and closed there.

    Steps, and the copies that come with them, take effect in the order in which they are launched.
    """

    @property
    def model_info(self) -> ModelInfo: ...

    def launch(self, plan: StepPlan) -> PendingStep:
        """Begin a step, behind all that were launched before. A row whose last token those are
        still to sample takes it from them. May raise: the requests of the plan then fail, and a
        later plan retires their rows, of which the executor may know all, some or none."""
        ...

    def resize(self, change: PoolResize) -> None:
        """With no step in flight. May raise; the engine is then beyond use."""
        ...

    def free_bytes(self) -> int:
        """Memory of the device that nobody uses."""
        ...

    def use_idle_time(self) -> bool:
        """With no step in flight and nothing to compute: spend about a millisecond on what would
        delay a later step. False: nothing is left of it. Raises nothing."""
        ...

    def save_blocks(self, path: str, blocks: Mapping[bytes, int]) -> None:
        """Write these blocks and their digests to a file. Raises OSError."""
        ...

    def saved_digests(self, path: str) -> list[bytes]:
        """What such a file holds, in its order; empty if it is not this model's and layout's."""
        ...

    def load_blocks(self, path: str, places: Sequence[tuple[int, int]]) -> None:
        """Copy blocks of the file, by position, into blocks of the pool: (position, block)."""
        ...

    def close(self) -> None: ...
