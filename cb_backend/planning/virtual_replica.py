"""One engine on a virtual clock: the real scheduler, and a cost model in place of the device."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from cb_backend.core.rates import StepRates, TokenBudget
from cb_backend.core.request import Request
from cb_backend.core.scheduler import Scheduler
from cb_backend.core.step_io import StepPlan, StepResult, TokenEvent
from cb_backend.errors import CBError, RecordingError
from cb_backend.planning.cost_model import CostModel, StepWork
from cb_backend.planning.recording import Arrival, End, Header
from cb_backend.planning.replay import build_request, recorded_policy
from cb_backend.planning.token_ids import TokenIds


@dataclass(slots=True)
class Served:
    """How one request fared. Seconds of the trace's clock."""

    arrival: float
    times: list[float] = field(default_factory=list)  # when each step brought it something

    @property
    def ttft(self) -> float:
        return self.times[0] - self.arrival

    @property
    def gaps(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.times, self.times[1:], strict=False)]


class VirtualReplica:
    """Takes its requests in as they arrive; nobody aborts, no step fails, nothing is refused."""

    def __init__(self, header: Header, cost: CostModel, block_size: int) -> None:
        """`block_size` is that of the trace's blocks, not of the replica's."""
        self._scheduler = Scheduler(header.limits, recorded_policy(header, header.policy))
        self._runs_ahead = bool(header.model.get("runs_ahead"))
        # A CPU's host helps with a step before it decides the next one, see `Engine.help`.
        self._decides_late = header.model.get("device") == "cpu"
        self._in_flight: tuple[StepPlan, float] | None = None  # and the seconds that it takes
        self._cost = cost
        self._token_ids = TokenIds(block_size)
        self._rates = StepRates()
        self._budget = TokenBudget(
            low=header.limits.max_num_seqs,
            high=header.limits.max_num_batched_tokens,
            target_s=header.target_itl_s,
        )
        self._live: dict[str, tuple[Request, list[int]]] = {}
        self._served: dict[str, Served] = {}
        self._clock = 0.0
        self._spread = itertools.cycle(cost.spread)

    def run(self, requests: Sequence[tuple[Arrival, End]]) -> list[Served]:
        """Raises RecordingError if a request can never fit the replica's pool."""
        coming = deque(requests)
        while coming or self._has_work:
            if not self._has_work:
                self._clock = max(self._clock, coming[0][0].time)
            while coming and coming[0][0].time <= self._next_decision:
                self._arrive(*coming.popleft())
            self._step()
        return list(self._served.values())

    def _arrive(self, arrival: Arrival, end: End) -> None:
        # Whatever ended it, it ends after as much output as it got.
        end = End(end.number, "stop", end.num_output_tokens, end.blocks)
        request, sequence = build_request(arrival, end, self._token_ids)
        try:
            self._scheduler.add(request)
        except CBError as error:
            raise RecordingError(f"a request of the trace cannot be served: {error}") from None
        self._live[arrival.request_id] = request, sequence
        self._served[arrival.request_id] = Served(arrival.time)

    @property
    def _has_work(self) -> bool:
        return self._in_flight is not None or self._scheduler.has_work

    @property
    def _next_decision(self) -> float:
        if self._in_flight is None or not self._decides_late:
            return self._clock
        return self._clock + self._in_flight[1]

    def _step(self) -> None:
        """As an engine's: running ahead, the next step is decided when the device begins one, or
        when it is about to end it."""
        before, self._in_flight = self._in_flight, None
        if before is None or (self._scheduler.has_work and not self._scheduler.only_awaits):
            self._in_flight = self._launch()
        if not self._runs_ahead:
            before, self._in_flight = self._in_flight, None
        if before is not None:
            self._land(*before)

    def _launch(self) -> tuple[StepPlan, float]:
        self._scheduler.token_budget = self._budget.choose(self._rates)
        plan = self._scheduler.schedule()
        return plan, self._cost.step_seconds(StepWork.of_plan(plan)) * next(self._spread)

    def _land(self, plan: StepPlan, seconds: float) -> None:
        self._clock += seconds
        if plan.rows:
            self._rates.observe(plan.num_tokens, seconds)
        self._take(self._scheduler.update(plan, self._result(plan), self._clock))
        if self._scheduler.has_work:
            self._clock += self._cost.between_s

    def _result(self, plan: StepPlan) -> StepResult:
        token_ids: dict[str, tuple[int, ...]] = {}
        for row in plan.rows:
            if row.samples and row.request_id in self._live:  # else it has ended meanwhile
                request, sequence = self._live[row.request_id]
                token_ids[row.request_id] = (sequence[request.num_tokens],)
        return StepResult(token_ids, {})

    def _take(self, events: Sequence[TokenEvent]) -> None:
        for event in events:
            self._served[event.request_id].times.append(self._clock)
            if event.finish_reason is not None:
                del self._live[event.request_id]
