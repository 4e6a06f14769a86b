"""A whole engine on one seed: no thread, no clock, no model, and nothing random but the seed.

`run` plays a scenario and raises SimulationError on the first thing that is wrong. The executor
keeps token ids in the paged pool and computes each next token from what it gathers through the
block tables, so a fault of paging, sharing, swapping or preemption changes a request's text.
(After the deterministic simulations of FoundationDB and TigerBeetle.)
"""

from __future__ import annotations

from collections.abc import Sequence

from cb_backend.config import EngineConfig
from cb_backend.core.request import FinishReason, Request
from cb_backend.core.sampling_params import SamplingParams
from cb_backend.core.step_io import StepPlan, TokenEvent
from cb_backend.engine.controls import resize_kv_pool, use_policy
from cb_backend.engine.engine import Engine
from cb_backend.engine.output_queue import OutputQueue
from cb_backend.engine.recorder import Recorder
from cb_backend.errors import EngineDeadError, EngineUnavailableError, OutOfBlocksError
from tests.fakes import ShadowExecutor, make_model_info, next_by_hashing, solo_output
from tests.simulation.checks import PlanChecks, SimulationError
from tests.simulation.readers import Readers
from tests.simulation.scenario import (
    AGEING_S,
    MOST_TOKENS,
    WEIGHTS,
    Abort,
    Crash,
    Drain,
    Event,
    FailRow,
    FailStep,
    Resize,
    Scenario,
    Submit,
    UsePolicy,
    draw,
)

__all__ = ["SimulationError", "World", "draw", "run"]


class World:
    """One scenario being played."""

    def __init__(self, scenario: Scenario, recording: Recorder | None = None) -> None:
        self.scenario = scenario
        self.steps = 0
        self.now = 0.0
        self.submits: dict[str, Submit] = {}
        self.may_fail: set[str] = set()
        self.aborted: set[str] = set()
        self._ended_early = False  # drained or crashed
        self._fail_next: FailStep | None = None
        limits = scenario.limits
        info = make_model_info(
            num_blocks=limits.num_blocks,
            block_size=limits.block_size,
            window=limits.window,
            max_model_len=MOST_TOKENS,
            runs_ahead=scenario.runs_ahead,
        )
        self.executor = ShadowExecutor(
            info,
            next_token=next_by_hashing,
            before_step=self._before_step,
            before_launch=self._before_launch,
            num_host_blocks=limits.num_host_blocks,
        )
        self.engine = Engine(
            _config_of(scenario), self.executor, clock=lambda: self.now, recording=recording
        )
        self.queue = OutputQueue()
        self.readers = Readers(self.queue)
        self._checks = PlanChecks(scenario, self.engine, self.submits)

    def play(self) -> None:
        for event in self.scenario.events:
            for _ in range(event.steps_before):
                self._step()
            if self._ended_early:
                break
            self._apply(event)
        self._run_dry()
        self.readers.read_everything()
        self._check_the_end()

    def _apply(self, event: Event) -> None:
        match event:
            case Submit():
                self._submit(event)
            case Abort(name=name):
                self._abort(name)
            case Drain(steps_left=steps_left):
                self._drain(steps_left)
            case Crash():
                self._crash()
            case _:
                self._disturb(event)
        if not self._ended_early:
            self.engine.check()

    def _disturb(self, event: Event) -> None:
        match event:
            case UsePolicy(policy=policy):
                use_policy(self.engine, policy)
            case Resize(num_blocks=num_blocks):
                self._publish(self.engine.collect())
                resize_kv_pool(self.engine, num_blocks)
                self._checks.follow_resize(self.executor.resizes[-1])
            case FailStep():
                if self.engine.has_work:
                    self._fail_next = event
            case FailRow(name=name):
                if name in self.submits:
                    self.executor.fail_rows.add(name)
                    self.may_fail.add(name)

    def _abort(self, name: str) -> None:
        if name in self.submits and name not in self.readers.delivered_end:
            self.aborted.add(name)
        self.queue.publish(self.engine.abort(name))
        if name in self.engine.scheduler.running:
            raise SimulationError(f"{name} runs on after its abort")

    def _submit(self, submit: Submit) -> None:
        self.submits[submit.name] = submit
        self.readers.open(submit.name, submit.pace)
        refused = self.engine.add(_request_of(submit, self.now))
        for event in refused:
            assert event.error is not None
            has_deadline = submit.deadline_s < 1e9
            if event.error.code != "deadline_unreachable" or not has_deadline:
                raise SimulationError(f"{submit.name} is refused: {event.error.message}")
            self.may_fail.add(submit.name)
        self.queue.publish(refused)

    def _drain(self, steps_left: int) -> None:
        for _ in range(steps_left):
            self._step()
        self._publish(self.engine.collect())
        self._end_early(EngineUnavailableError("drained"))

    def _crash(self) -> None:
        def refuse(count: int) -> list[int]:
            raise OutOfBlocksError("simulated fault of ours")

        self.engine.scheduler.blocks.pool.allocate = refuse  # type: ignore[method-assign]
        while self.engine.has_work:
            try:
                self._step()
            except OutOfBlocksError:
                self._end_early(EngineDeadError("crashed"))
                return

    def _end_early(self, error: EngineUnavailableError) -> None:
        self._ended_early = True
        self.may_fail |= self.submits.keys() - self.readers.delivered_end
        self.queue.fail_all(error, step=self.steps, now=self.now, final=True)

    def _step(self) -> None:
        if not self.engine.has_work or self._ended_early:
            return
        self.steps += 1
        failed_before = self.engine.stats().failed_steps
        self._publish(self.engine.step())
        self._checks.after_step(self.executor, self.engine.stats().failed_steps > failed_before)
        self.readers.read(self.steps)

    def _before_launch(self, plan: StepPlan) -> None:
        self._checks.before_launch(plan)
        if self._fail_next is not None and self._fail_next.at_launch:
            self._fail([plan])

    def _before_step(self, plan: StepPlan) -> None:
        self.now += 0.01 + 0.002 * plan.num_tokens
        if self._fail_next is not None and not self._fail_next.at_launch:
            self._fail([plan, *self.executor.launched])  # what runs behind it falls with it

    def _fail(self, plans: list[StepPlan]) -> None:
        self._fail_next = None
        self.may_fail |= {row.request_id for plan in plans for row in plan.rows}
        raise RuntimeError("simulated device fault")

    def _publish(self, events: Sequence[TokenEvent]) -> None:
        for event in events:
            if event.request_id in self.aborted and event.token_ids:
                raise SimulationError(f"{event.request_id} got tokens after its abort")
            if event.request_id in self.readers.delivered_end:
                raise SimulationError(f"{event.request_id} got an event after its last one")
        self.queue.publish(events)

    def _run_dry(self) -> None:
        known = sum(len(s.prompt) + s.max_tokens for s in self.submits.values())
        # Each step computes a token at least. Preemption computes some again: allow tenfold.
        for _ in range(10 * known + 100):
            if not self.engine.has_work or self._ended_early:
                return
            self._step()
        raise SimulationError(f"still at work after {self.steps} steps")

    def _check_the_end(self) -> None:
        if missing := self.submits.keys() - self.readers.ended.keys():
            raise SimulationError(f"{sorted(missing)} never ended")
        if len(self.queue):
            raise SimulationError("the output queue remembers requests that have ended")
        for name, submit in self.submits.items():
            self._check_output(name, submit)
        if self._ended_early:
            return
        blocks = self.engine.scheduler.blocks
        while blocks.pins.drop_oldest():
            pass
        if blocks.pool.num_available != blocks.pool.num_blocks:
            raise SimulationError(f"{blocks.pool.num_in_use} blocks in use when all is done")
        if sum(self.engine.stats().finished.values()) != len(self.submits):
            raise SimulationError("the counts of endings disagree")

    def _check_output(self, name: str, submit: Submit) -> None:
        output, reason = self.readers.output[name], self.readers.ended[name]
        expected, expected_reason = _expected_end(submit, self.scenario.limits.window)
        aborted = reason is FinishReason.ABORT and name in self.aborted
        if aborted or (reason is FinishReason.ERROR and name in self.may_fail):
            expected, expected_reason = expected[: len(output)], reason
        if output != expected or reason is not expected_reason:
            raise SimulationError(
                f"{name} ended with {reason.name} and {output},"
                f" alone with {expected_reason.name} and {expected}"
            )


def run(scenario: Scenario) -> World:
    """Play it. Raises SimulationError, or whatever the code under test raises."""
    world = World(scenario)
    world.play()
    return world


def _config_of(scenario: Scenario) -> EngineConfig:
    limits = scenario.limits
    return EngineConfig(
        model="simulated",
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_prefill_chunk=limits.max_prefill_chunk,
        enable_prefix_caching=limits.enable_prefix_caching,
        policy=limits.policy,  # type: ignore[arg-type]
        priority_ageing_s=AGEING_S,
        tenant_weights=WEIGHTS,
        num_host_kv_blocks=limits.num_host_blocks,
        check_invariants=True,
    )


def _request_of(submit: Submit, now: float) -> Request:
    return Request(
        request_id=submit.name,
        token_ids=list(submit.prompt),
        num_prompt_tokens=len(submit.prompt),
        params=SamplingParams(temperature=0.0, max_tokens=submit.max_tokens),
        max_tokens=submit.max_tokens,
        stop_token_ids=frozenset(submit.stop_token_ids),
        seed=0,
        arrival_time=now,
        cache_salt=submit.salt,
        priority=submit.priority,
        tenant=submit.tenant,
        deadline=now + submit.deadline_s,
        fork_of=submit.fork_of,
        pin_s=submit.pin_s,
    )


def _expected_end(submit: Submit, window: int | None) -> tuple[list[int], FinishReason]:
    """What the request brings if nobody aborts it and no step fails."""
    output = solo_output(submit.prompt, submit.max_tokens, next_by_hashing, window)
    for index, token_id in enumerate(output):
        if token_id in submit.stop_token_ids:
            return output[: index + 1], FinishReason.STOP
    return output, FinishReason.LENGTH
