"""One request as the scheduler sees it. The engine thread's own, from submit to the last event."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum

from cb_backend.core.sampling_params import SamplingParams
from cb_backend.errors import InternalError


class RequestStatus(IntEnum):
    WAITING = 0  # never ran
    RUNNING = 1
    PREEMPTED = 2  # ran, lost its blocks, waits to be computed again
    FINISHED = 3


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class RequestCost:
    """What a request took, known at its end."""

    device_seconds: float  # its share of the steps it was in, by tokens
    kv_block_seconds: float  # KV blocks held, times seconds of those steps
    num_preemptions: int


@dataclass(slots=True, eq=False)
class Request:
    """`token_ids` is the prompt followed by the output: all that is known of the sequence.

    `num_computed_tokens` of them have their K and V in the cache; a step computes some more. Those
    of a step in flight count as computed. Once they are all that is known, one more token is on its
    way: sampled on the device, its id not yet here.
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    max_tokens: int  # resolved: the client's wish or what is left of the context
    stop_token_ids: frozenset[int]  # the client's and, unless ignore_eos, the model's
    seed: int
    arrival_time: float  # seconds, the engine's clock
    cache_salt: str = ""
    priority: int = 0  # higher is more urgent
    tenant: str = ""
    deadline: float = math.inf  # seconds, the engine's clock: when the whole answer must be there
    fork_of: str | None = None  # the request whose prompt this one shares
    pin_s: float = 0.0  # seconds to keep its prompt's blocks once computed; 0 when that is done

    sequence: int = 0  # place in the order of arrival, given by the scheduler
    status: RequestStatus = RequestStatus.WAITING
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache at first admission
    block_table: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)  # of the full blocks of token_ids
    num_indexed_blocks: int = 0  # leading blocks of the table that the prefix cache has seen
    num_preemptions: int = 0
    num_charged: int = 0  # tokens that the policy has accounted for
    device_seconds: float = 0.0  # its share of its steps, by tokens
    block_seconds: float = 0.0  # KV blocks held, times seconds of its steps up to `charged_until`,
    charged_until: float | None = None  # which is of all steps' seconds; None: none of its is over
    most_tokens: int = field(init=False)  # prompt and output, at the longest

    def __post_init__(self) -> None:
        self.most_tokens = self.num_prompt_tokens + self.max_tokens

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """That are known; or the one on its way, if a step shall compute it."""
        num_known = len(self.token_ids) - self.num_computed_tokens
        return num_known or int(not self.ends_with_next)

    @property
    def ends_with_next(self) -> bool:
        """Whether the next token is the last, whatever it is."""
        return len(self.token_ids) + 1 >= self.most_tokens

    def charge(self, step_seconds: float) -> None:
        """With its blocks, up to so many seconds of all steps. Hundreds hold theirs through every
        step, and only when a table grows or goes is there something to write down."""
        if self.charged_until is not None:
            self.block_seconds += len(self.block_table) * (step_seconds - self.charged_until)
            self.charged_until = step_seconds

    def cost(self) -> RequestCost:
        return RequestCost(self.device_seconds, self.block_seconds, self.num_preemptions)

    def append_output(
        self, sampled: tuple[int, ...]
    ) -> tuple[tuple[int, ...], FinishReason | None]:
        """Keep what a step sampled, up to the end; returns what was kept and why it ended, if so.

        A stop token at the very last place counts as STOP: the model did end there.
        """
        if not sampled:
            raise InternalError(f"a sampling row brought no token for {self!r}")
        token_ids, num_before = self.token_ids, len(self.token_ids)
        for token_id in sampled:
            token_ids.append(token_id)
            if token_id in self.stop_token_ids:
                return tuple(token_ids[num_before:]), FinishReason.STOP
            if len(token_ids) == self.most_tokens:
                return tuple(token_ids[num_before:]), FinishReason.LENGTH
        return sampled, None

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id} {self.status.name} prompt={self.num_prompt_tokens}"
            f" output={self.num_output_tokens}/{self.max_tokens}"
            f" computed={self.num_computed_tokens} blocks={len(self.block_table)})"
        )
