"""Plays a recording on the scheduler of this version and compares every decision.

No clock and no model: requests come, leave and fail at the recorded steps, and each step brings
the recorded number of tokens. A step that was in flight while other things happened is so here too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cb_backend.config import EngineConfig
from cb_backend.core.policies import POLICIES, Policy, policy_of
from cb_backend.core.pool_resize import resize_pool
from cb_backend.core.recorded_step import Json, decision
from cb_backend.core.request import Request
from cb_backend.core.sampling_params import SamplingParams
from cb_backend.core.scheduler import Scheduler
from cb_backend.core.step_io import StepPlan, StepResult, TokenEvent
from cb_backend.errors import CBError, ErrorInfo, RecordingError
from cb_backend.planning.recording import (
    Abort,
    Arrival,
    Change,
    End,
    Entry,
    Header,
    Launch,
    Recording,
    Refused,
    Restored,
    Step,
)
from cb_backend.planning.token_ids import TokenIds

_FAILED = ErrorInfo("request_failed", "it failed when it was recorded")


@dataclass(frozen=True, slots=True)
class Replayed:
    """How far decisions were the same, and the first that was not."""

    num_steps: int  # identical ones
    difference: str = ""  # empty: none


class Replay:
    """One recording being played. Its requests must all have arrived before they are named."""

    def __init__(self, recording: Recording) -> None:
        header = recording.header
        self.scheduler = Scheduler(header.limits, recorded_policy(header, header.policy))
        self._header = header
        self._entries = recording.entries
        self._ends = recording.ends
        self._token_ids = TokenIds(header.limits.block_size)
        self._live: dict[str, tuple[Request, list[int]]] = {}  # with prompt and output to come
        self._numbers: dict[str, int] = {}  # by id, of all that arrived
        self._ids: dict[int, str] = {}
        self._ended: dict[int, str] = {}  # how, in the replay but not yet in the recording
        self._num_steps = 0

    def play(self) -> Replayed:
        """Raises RecordingError when the recording contradicts itself."""
        for entry in self._entries:
            if difference := self._play(entry):
                return Replayed(self._num_steps, difference)
        return Replayed(self._num_steps)

    def _play(self, entry: Entry) -> str:
        """What is not as it was recorded; empty if all is."""
        match entry:
            case Arrival():
                return self._arrive(entry)
            case Abort(number):
                return self._abort(number)
            case Change(what, to):
                return self._change(what, to)
            case Restored():
                return self._restore(entry)
            case Launch(step, decided):
                return self._launch(step, decided)
            case Step():
                return self._land(entry)
            case End():
                return self._end(entry)
            case Refused():
                return ""  # has never been in the scheduler

    def _arrive(self, arrival: Arrival) -> str:
        end = self._ends.get(arrival.number)
        request, sequence = build_request(arrival, end, self._token_ids)
        self._live[arrival.request_id] = request, sequence
        self._numbers[arrival.request_id] = arrival.number
        self._ids[arrival.number] = arrival.request_id
        try:
            self.scheduler.add(request)
        except CBError as error:
            return f"request {arrival.number} was taken in, the replay refuses it: {error.message}"
        return ""

    def _abort(self, number: int) -> str:
        self._take(self.scheduler.abort(self._id_of(number), now=0.0))
        return ""

    def _change(self, what: str, to: str | int) -> str:
        if what not in CHANGES:
            raise RecordingError(f"the recording changes {what!r}, which this version cannot")
        CHANGES[what](self.scheduler, self._header, to)
        return ""

    def _restore(self, restored: Restored) -> str:
        """As `engine.saved_cache.restore_cache` does."""
        arrivals = (entry for entry in self._entries if isinstance(entry, Arrival))
        digest_of = self._token_ids.digests(
            _all_blocks(arrival, self._ends.get(arrival.number)) for arrival in arrivals
        )
        blocks = self.scheduler.blocks
        block_ids = blocks.pool.allocate(restored.num_blocks)
        for block, block_id in zip(restored.blocks, block_ids, strict=False):
            # One that no request had can be called anything: nobody looks for it.
            blocks.prefix_cache.insert(digest_of.get(block, block.encode()), block_id)
        for block_id in block_ids:
            blocks.pool.release([block_id])
        return ""

    def _launch(self, step: int, decided: Json) -> str:
        if not self.scheduler.has_work:
            return f"step {step} was made, the replay has no work left for it"
        token_budget = int(decided["budget"])
        self.scheduler.token_budget = token_budget
        plan = self.scheduler.schedule()
        replayed = decision(plan, token_budget, self._numbers)
        if replayed != decided:
            return f"step {step} differs\nrecorded: {_text(decided)}\nreplayed: {_text(replayed)}"
        return ""

    def _land(self, step: Step) -> str:
        plan = self.scheduler.plans_in_flight[0]
        if step.failed is None:
            self._take(self.scheduler.fail(plan, _FAILED, now=step.end))
        else:
            result = self._result(plan, step, step.failed)
            self._take(self.scheduler.update(plan, result, now=step.end))
        self._num_steps += 1
        return ""

    def _result(self, plan: StepPlan, step: Step, failed_numbers: frozenset[int]) -> StepResult:
        failed = {self._id_of(number): _FAILED for number in failed_numbers}
        token_ids = {
            row.request_id: self._next_tokens(
                row.request_id, step.took.get(self._numbers[row.request_id], 1)
            )
            for row in plan.rows
            if row.samples and row.request_id not in failed and row.request_id in self._live
        }
        return StepResult(token_ids, failed)

    def _next_tokens(self, request_id: str, count: int) -> tuple[int, ...]:
        request, sequence = self._live[request_id]
        return tuple(sequence[request.num_tokens : request.num_tokens + count])

    def _end(self, end: End) -> str:
        replayed = self._ended.pop(end.number, "lives on")
        recorded = _ending(end.reason, end.num_output_tokens)
        if end.reason is None or replayed == recorded:
            return ""
        return f"request {end.number} {recorded}; replayed, it {replayed}"

    def _take(self, events: Sequence[TokenEvent]) -> None:
        for event in events:
            if event.finish_reason is not None:
                request, _ = self._live.pop(event.request_id)
                ending = _ending(event.finish_reason, request.num_output_tokens)
                self._ended[self._numbers[event.request_id]] = ending

    def _id_of(self, number: int) -> str:
        if number not in self._ids:
            raise RecordingError(f"the recording names request {number} before its arrival")
        return self._ids[number]


def build_request(
    arrival: Arrival, end: End | None, token_ids: TokenIds
) -> tuple[Request, list[int]]:
    """The recorded request with ids of ours, and its sequence as far as max_tokens may take it."""
    blocks = _all_blocks(arrival, end)
    sequence = token_ids.sequence(blocks, arrival.num_prompt_tokens + arrival.max_tokens)
    stop_token_ids: frozenset[int] = frozenset()
    if end is not None and end.reason == "stop":
        stop_token_ids = frozenset(
            [sequence[arrival.num_prompt_tokens + end.num_output_tokens - 1]]
        )
    request = Request(
        request_id=arrival.request_id,
        token_ids=sequence[: arrival.num_prompt_tokens],
        num_prompt_tokens=arrival.num_prompt_tokens,
        params=SamplingParams(),
        max_tokens=arrival.max_tokens,
        stop_token_ids=stop_token_ids,
        seed=0,
        arrival_time=arrival.time,
        priority=arrival.priority,
        tenant=arrival.tenant,
        deadline=arrival.deadline,
        fork_of=arrival.fork_of,
        pin_s=arrival.pin_s,
    )
    return request, sequence


def _all_blocks(arrival: Arrival, end: End | None) -> tuple[str, ...]:
    return arrival.blocks if end is None else arrival.blocks + end.blocks


def recorded_policy(header: Header, name: str) -> Policy:
    """Raises RecordingError for a policy of somebody's own: a file must not name code to run."""
    if name not in POLICIES:
        raise RecordingError(
            f"the policy {name!r} is not one of {', '.join(sorted(POLICIES))}; a recording of"
            " another policy cannot be played"
        )
    config = EngineConfig(
        model="recorded",
        priority_ageing_s=header.priority_ageing_s,
        tenant_weights=header.tenant_weights,
    )
    return policy_of(config, name)


def _use_policy(scheduler: Scheduler, header: Header, name: str | int) -> None:
    scheduler.roster.use(recorded_policy(header, str(name)))


def _resize(scheduler: Scheduler, header: Header, num_blocks: str | int) -> None:
    resize_pool(scheduler, int(num_blocks), fewest=0)  # it was enough when it was recorded


# What may change in a running engine, by the name under which it is recorded.
CHANGES: dict[str, Callable[[Scheduler, Header, str | int], None]] = {
    "policy": _use_policy,
    "num_blocks": _resize,
}


def _ending(reason: str | None, num_output_tokens: int) -> str:
    return f"ended by {reason} after {num_output_tokens} tokens of output"


def _text(line: Json) -> str:
    return json.dumps(line, separators=(",", ":"))
