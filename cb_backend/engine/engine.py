"""Engine: a scheduler, an executor and a clock, stepped by whoever built it (the engine thread).

If the executor runs ahead, there is always a step in flight while there is work: the host schedules
and launches the next one, and takes in what the one before has brought, while the device computes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from cb_backend.config import EngineConfig
from cb_backend.core.admission import AdmissionLimits, refusal
from cb_backend.core.invariants import check_plan, check_scheduler
from cb_backend.core.policies import policy_of
from cb_backend.core.rates import StepRates, TokenBudget
from cb_backend.core.request import FinishReason, Request
from cb_backend.core.scheduler import Scheduler
from cb_backend.core.scheduler_limits import SchedulerLimits
from cb_backend.core.step_io import (
    Executor,
    ModelInfo,
    NextTokens,
    StepPlan,
    StepResult,
    TokenEvent,
)
from cb_backend.engine.launched_step import LaunchedStep, launch
from cb_backend.engine.recorder import RecordedSettings, Recorder
from cb_backend.engine.stats import EngineStats, StatsRecorder
from cb_backend.errors import CBError, ErrorInfo, WrongThreadError


class Engine:
    """Owns all scheduler, KV and device state. Every method but `stats` asserts the thread."""

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        clock: Callable[[], float],
        recording: Recorder | None = None,
    ) -> None:
        self.executor = executor
        self.config = config
        self.scheduler = Scheduler(
            _scheduler_limits(config, executor.model_info), policy_of(config, config.policy)
        )
        self.recorder = StatsRecorder()
        self.rates = StepRates()
        self._budget = TokenBudget(
            low=config.max_num_seqs,
            high=config.max_num_batched_tokens,
            target_s=config.target_itl_s,
        )
        self._admission = AdmissionLimits(
            max_num_waiting=config.max_num_waiting, max_waiting_tokens=config.max_waiting_tokens
        )
        self._check_every_step = config.check_invariants
        self._runs_ahead = executor.model_info.runs_ahead
        self._in_flight: LaunchedStep | None = None
        self._last_ended = 0.0  # when the last step's result was here
        self.clock = clock
        self._thread_id = threading.get_ident()
        self.recording = recording or Recorder()
        self.recording.begin(
            _recorded_settings(config, self.scheduler.limits), executor.model_info, clock()
        )

    @property
    def has_work(self) -> bool:
        return self._in_flight is not None or self.scheduler.has_work

    def add(self, request: Request) -> Sequence[TokenEvent]:
        """Queue a request; one that is refused ends at once, with an error event."""
        self.assert_thread()
        try:
            error = refusal(request, self.scheduler, self.rates, self._admission, self.clock())
            if error is not None:
                raise error
            self.scheduler.add(request)
        except CBError as error:
            self.recording.refused(request, error.info())
            return self._record(
                [_refused(request, error.info(), self.recorder.steps, self.clock())]
            )
        self.recorder.record_arrival(request)
        self.recording.arrived(request)
        return []

    def abort(self, request_id: str) -> Sequence[TokenEvent]:
        self.assert_thread()
        self.recording.aborting(request_id)
        return self._record(self.scheduler.abort(request_id, self.clock()))

    def step(self) -> Sequence[TokenEvent]:
        """One forward pass: what is known of every request grows, and some end. Running ahead,
        what it brings is that of the pass before, and the first brings nothing."""
        self.assert_thread()
        before = self._in_flight
        if before is not None and (self.scheduler.only_awaits or not self.scheduler.has_work):
            return self.collect()
        self._in_flight = after = self._launch()
        events: Sequence[TokenEvent] = []
        if before is not None:
            result = before.result()
            events = self._land(before, result)
            if isinstance(result, ErrorInfo):  # it may have read what was never computed
                after.result()
                self._in_flight = None
                return [*events, *self._land(after, result)]
        if not self._runs_ahead or after.has_failed:
            return [*events, *self.collect()] if events else self.collect()
        return events

    def help(self) -> None:
        """Take part in the step in flight, where the host can, until its end is near. As late as
        that the next one is scheduled, so that who arrives meanwhile joins it."""
        self.assert_thread()
        if self._in_flight is not None:
            self._in_flight.help()

    def collect(self) -> Sequence[TokenEvent]:
        """Wait for the step in flight, if there is one; afterwards there is none."""
        self.assert_thread()
        if (step := self._in_flight) is None:
            return []
        self._in_flight = None
        return self._land(step, step.result())

    def check(self) -> None:
        """Raises InvariantError if the scheduler's books do not balance."""
        check_scheduler(self.scheduler)

    def close(self) -> None:
        self.assert_thread()
        self.recording.close()
        self.executor.close()

    def stats(self) -> EngineStats:
        """A snapshot. Any thread."""
        pool, recorder = self.scheduler.blocks.pool, self.recorder
        return EngineStats(
            num_running=len(self.scheduler.running),
            num_waiting=len(self.scheduler.waiting),
            kv_usage=pool.num_in_use / pool.num_blocks,
            steps=recorder.steps,
            failed_steps=recorder.failed_steps,
            preemptions=self.scheduler.planner.num_preemptions,
            computed_tokens=recorder.computed_tokens,
            cached_tokens=self.scheduler.planner.num_cached_tokens,
            prompt_tokens=recorder.prompt_tokens,
            generated_tokens=self.scheduler.num_output_tokens,
            finished=dict(recorder.finished),
            tenants=dict(recorder.tenants),
        )

    def _launch(self) -> LaunchedStep:
        began = self.clock()
        self.scheduler.token_budget = self._budget.choose(self.rates)
        plan = self.scheduler.schedule()
        if self._check_every_step:
            check_plan(self.scheduler, plan)
        self.recording.launched(plan, self.scheduler.token_budget)
        num_preemptions = self.scheduler.planner.num_preemptions
        return LaunchedStep(plan, launch(self.executor, plan), began, num_preemptions)

    def _land(self, step: LaunchedStep, result: StepResult | ErrorInfo) -> Sequence[TokenEvent]:
        ended = self.clock()
        started = max(step.began, self._last_ended)  # the device takes one step after the other
        self._last_ended, seconds = ended, ended - started
        # A failure behind another one takes no time, and would tell of a device without end.
        if step.plan.rows and not (self._runs_ahead and isinstance(result, ErrorInfo)):
            self.rates.observe(step.plan.num_tokens, seconds)
        events = self._update(step.plan, result, ended, seconds)
        self.recorder.record_step(
            step, started, ended, self.scheduler, failed=isinstance(result, ErrorInfo)
        )
        self.recording.stepped(step.plan, result, events, seconds=seconds, now=ended)
        return self._record(events)

    def _update(
        self, plan: StepPlan, result: StepResult | ErrorInfo, now: float, seconds: float
    ) -> Sequence[TokenEvent]:
        if isinstance(result, ErrorInfo):
            failed = self.scheduler.fail(plan, result, now, seconds)
            self.check()
            return failed
        events = self.scheduler.update(plan, result, now, seconds)
        if self._check_every_step:
            self.check()
        return events

    def _record(self, events: Sequence[TokenEvent]) -> Sequence[TokenEvent]:
        if not isinstance(events, NextTokens):  # else none is a last one
            self.recorder.record_events(events)
            self.recording.ended(events)
        return events

    def assert_thread(self) -> None:
        if threading.get_ident() != self._thread_id:
            raise WrongThreadError("the engine belongs to the thread that built it; use its inbox")


def _scheduler_limits(config: EngineConfig, info: ModelInfo) -> SchedulerLimits:
    return SchedulerLimits(
        num_blocks=info.num_blocks,
        block_size=info.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_prefill_chunk=config.max_prefill_chunk or max(1, config.max_num_batched_tokens // 2),
        enable_prefix_caching=config.enable_prefix_caching,
        num_host_blocks=config.num_host_kv_blocks,
        swap_costs=info.swap_costs,
        window=info.window,
    )


def _recorded_settings(config: EngineConfig, limits: SchedulerLimits) -> RecordedSettings:
    return RecordedSettings(
        limits=limits,
        policy=config.policy,
        priority_ageing_s=config.priority_ageing_s,
        tenant_weights=config.tenant_weights or {},
        target_itl_s=config.target_itl_s,
    )


def _refused(request: Request, error: ErrorInfo, step: int, now: float) -> TokenEvent:
    return TokenEvent(
        request_id=request.request_id,
        token_ids=(),
        step=step,
        time=now,
        finish_reason=FinishReason.ERROR,
        error=error,
    )
