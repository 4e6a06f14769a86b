"""The requests of steps that go on, one from the other. Engine thread only.

A step *goes on* from the one before it when it has the same requests in the same order, each with
one token, computed to sample the next, and nobody joins, leaves, changes places or is at its end.
With hundreds of requests running, nearly all steps go on, and all that can be asked of a row has
the answer of the step before. So the planner and the scheduler need not ask every request: they
take what holds for the whole cohort from here, and do only what changes. Whatever is not of this
kind takes the way that asks every request, and gives the same where both can be taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cb_backend.core.request import Request
from cb_backend.core.step_io import NextTokens, StepResult


@dataclass(frozen=True, slots=True)
class Cohort:
    """What holds from its first step on, while one goes on from the other.

    `num_on` counts the steps from the first, which is 0.
    """

    requests: Sequence[Request]
    request_ids: tuple[str, ...]
    num_cached_tokens: tuple[int, ...]  # of each
    num_steps: int  # after so many somebody has only its last token to come
    stop_token_ids: frozenset[int]  # of all together
    is_pinning: bool  # whether somebody's next token is to pin its prompt
    _places: Sequence[list[int]]  # by the tokens in the last block when the first step began

    @classmethod
    def of(
        cls, requests: Sequence[Request], num_computed_tokens: Sequence[int], block_size: int
    ) -> Cohort | None:
        """Of a step in which each computes the one token after so many; None if the next step
        cannot go on from it."""
        num_left = [
            request.most_tokens - num_computed - 1
            for request, num_computed in zip(requests, num_computed_tokens, strict=True)
        ]
        if (num_steps := min(num_left)) < 2:
            return None
        places: list[list[int]] = [[] for _ in range(block_size)]
        for place, num_computed in enumerate(num_computed_tokens):
            places[num_computed % block_size].append(place)
        return cls(
            requests=requests,
            request_ids=tuple([request.request_id for request in requests]),
            num_cached_tokens=tuple([request.num_cached_tokens for request in requests]),
            num_steps=num_steps,
            stop_token_ids=frozenset().union(*[request.stop_token_ids for request in requests]),
            is_pinning=any(request.pin_s for request in requests),
            _places=places,
        )

    def begin_block(self, num_on: int) -> list[int]:
        """The places of those whose token is the first of a block: tables have no block to spare,
        so each takes one. In the step before, their token was the last of a block."""
        return self._places[-num_on % len(self._places)]

    def take_in(
        self, num_on: int, step: int, result: StepResult, now: float, seconds: float
    ) -> NextTokens | None:
        """Give each what a step sampled for it, and charge it with so many seconds, its share; an
        event for each. None, with nothing done, if the result is none to go on with: somebody
        fails, ends, gets more than one token, or is to have its prompt pinned."""
        if result.failed or self.is_pinning or num_on + 1 >= self.num_steps:
            return None
        sampled = list(map(result.token_ids.__getitem__, self.request_ids))
        try:
            token_ids = [token_id for (token_id,) in sampled]
        except ValueError:  # several for one row, or none
            return None
        if not self.stop_token_ids.isdisjoint(token_ids):
            return None
        for request, token_id in zip(self.requests, token_ids, strict=True):
            request.device_seconds += seconds
            request.token_ids.append(token_id)
        return NextTokens(self.request_ids, sampled, step, now, self.num_cached_tokens)
