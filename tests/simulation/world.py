"""A whole engine on one seed: no thread, no clock, no model, and nothing random but the seed.

`draw` makes a scenario from a seed, `run` plays it and raises SimulationError on the first thing
that is wrong. The executor keeps token ids in the paged pool and computes each next token from
what it gathers through the block tables, so a fault of paging, sharing or preemption changes a
request's text. (After the deterministic simulations of FoundationDB and TigerBeetle.)
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from cb_backend.config import EngineConfig
from cb_backend.core.policies import POLICIES
from cb_backend.core.request import FinishReason, Request
from cb_backend.core.sampling_params import SamplingParams
from cb_backend.core.step_io import BlockCopy, CopyKind, PoolResize, StepPlan, TokenEvent
from cb_backend.engine.controls import resize_kv_pool, use_policy
from cb_backend.engine.engine import Engine
from cb_backend.engine.recorder import Recorder
from tests.fakes import ShadowExecutor, make_model_info, next_by_hashing, solo_output

NUM_EVENTS = 60
MOST_TOKENS = 44  # of a prompt and its output
POLICY_NAMES = sorted(POLICIES)
AGEING_S = 20.0  # the simulated clock counts steps
WEIGHTS = {"a": 1.0, "b": 2.0}


class SimulationError(AssertionError):
    """Something that must hold did not."""


@dataclass(frozen=True, slots=True)
class Limits:
    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_prefill_chunk: int
    enable_prefix_caching: bool
    num_host_blocks: int
    policy: str
    window: int | None


@dataclass(frozen=True, slots=True)
class Submit:
    """`steps_before` steps run first, as before every other event."""

    steps_before: int
    name: str
    prompt: tuple[int, ...]
    max_tokens: int
    stop_token_ids: tuple[int, ...]
    salt: str
    priority: int
    tenant: str
    deadline: float
    fork_of: str | None
    pin_s: float


@dataclass(frozen=True, slots=True)
class Abort:
    steps_before: int
    name: str


@dataclass(frozen=True, slots=True)
class FailStep:
    """The next step raises, with its rows half taken in by the executor."""

    steps_before: int


@dataclass(frozen=True, slots=True)
class FailRow:
    """The named request fails alone in the next step that it takes part in."""

    steps_before: int
    name: str


@dataclass(frozen=True, slots=True)
class UsePolicy:
    steps_before: int
    policy: str


@dataclass(frozen=True, slots=True)
class Resize:
    steps_before: int
    num_blocks: int


Event = Submit | Abort | FailStep | FailRow | UsePolicy | Resize


@dataclass(frozen=True, slots=True)
class Scenario:
    seed: int
    limits: Limits
    events: tuple[Event, ...]


def draw(seed: int) -> Scenario:
    """The scenario of a seed: few distinct tokens and shared prefixes, so that blocks meet."""
    rng = random.Random(seed)
    limits = _draw_limits(rng)
    prefixes = [[rng.randrange(4) for _ in range(16)] for _ in range(3)]
    events: list[Event] = []
    names: list[str] = []
    for number in range(NUM_EVENTS):
        steps = rng.choice([0, 0, 0, 1, 1, 2, 3, 8])
        kind = rng.random()
        if kind < 0.75 or not names:
            names.append(f"r{number}")
            submit = _draw_submit(rng, steps, names[-1], prefixes)
            events.append(submit)
            if rng.random() < 0.15:
                for choice in range(rng.randint(1, 3)):
                    names.append(f"r{number}.{choice}")
                    length = rng.randint(1, submit.max_tokens)
                    events.append(
                        replace(
                            submit,
                            steps_before=0,
                            name=names[-1],
                            max_tokens=length,
                            fork_of=submit.name,
                        )
                    )
        elif kind < 0.88:
            events.append(Abort(steps, rng.choice(names[-8:])))
        elif kind < 0.93:
            events.append(FailRow(steps, rng.choice(names[-8:])))
        elif kind < 0.95:
            events.append(UsePolicy(steps, rng.choice(POLICY_NAMES)))
        elif kind < 0.97:
            fewest = -(-MOST_TOKENS // limits.block_size)
            events.append(Resize(steps, fewest + rng.choice([0, 0, 1, 5, 30])))
        else:
            events.append(FailStep(steps))
    return Scenario(seed, limits, tuple(events))


def _draw_limits(rng: random.Random) -> Limits:
    block_size = rng.choice([1, 2, 3, 4, 8, 16])
    max_num_seqs = rng.randint(1, 8)
    budget = rng.randint(max_num_seqs, 40)
    return Limits(
        block_size=block_size,
        # From barely enough for the largest request to room for all.
        num_blocks=-(-MOST_TOKENS // block_size) + rng.choice([0, 1, 3, 10, 60]),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_prefill_chunk=rng.randint(1, budget),
        enable_prefix_caching=rng.random() < 0.8,
        num_host_blocks=rng.choice([0, 1, 3, 12, 40]),
        policy=rng.choice(POLICY_NAMES),
        window=rng.choice([None, None, 2, 5, 17]),
    )


def _draw_submit(
    rng: random.Random, steps: int, name: str, prefixes: Sequence[Sequence[int]]
) -> Submit:
    head = list(rng.choice(prefixes)[: rng.randint(0, 16)])
    tail = [rng.randrange(4) for _ in range(rng.randint(0, 8))]
    prompt = tuple(head + tail) or (0,)
    max_tokens = rng.randint(1, MOST_TOKENS - len(prompt))
    stops: tuple[int, ...] = ()
    if rng.random() < 0.4:
        output = solo_output(prompt, max_tokens, next_by_hashing)
        stops = (rng.choice(output),)
    return Submit(
        steps_before=steps,
        name=name,
        prompt=prompt,
        max_tokens=max_tokens,
        stop_token_ids=stops,
        salt=rng.choice(["", "", "x"]),
        priority=rng.choice([0, 0, 0, 1, 5]),
        tenant=rng.choice("abc"),
        deadline=rng.choice([math.inf, rng.uniform(0, 400)]),
        fork_of=None,
        pin_s=rng.choice([0.0, 0.0, 0.0, 30.0, 1e9]),
    )


def expected_end(submit: Submit, window: int | None) -> tuple[list[int], FinishReason]:
    """What the request brings if nobody aborts it and no step fails."""
    output = solo_output(submit.prompt, submit.max_tokens, next_by_hashing, window)
    for index, token_id in enumerate(output):
        if token_id in submit.stop_token_ids:
            return output[: index + 1], FinishReason.STOP
    return output, FinishReason.LENGTH


class World:
    """One scenario being played."""

    def __init__(self, scenario: Scenario, recording: Recorder | None = None) -> None:
        limits = scenario.limits
        self.scenario = scenario
        self.steps = 0
        self.submits: dict[str, Submit] = {}
        self.output: dict[str, list[int]] = {}
        self.ended: dict[str, FinishReason] = {}
        self.may_fail: set[str] = set()
        self.aborted: set[str] = set()
        self._salt_of_block: dict[int, str] = {}  # of the request that wrote it last
        self._salt_of_host_block: dict[int, str] = {}
        self._tables: dict[str, list[int]] = {}
        self._fail_next_step = False
        self._resized = False  # since the last step
        self.executor = ShadowExecutor(
            make_model_info(
                num_blocks=limits.num_blocks,
                block_size=limits.block_size,
                window=limits.window,
                max_model_len=MOST_TOKENS,
            ),
            next_token=next_by_hashing,
            before_step=self._before_step,
            num_host_blocks=limits.num_host_blocks,
        )
        config = EngineConfig(
            model="simulated",
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_prefill_chunk=limits.max_prefill_chunk,
            enable_prefix_caching=limits.enable_prefix_caching,
            policy=limits.policy,
            priority_ageing_s=AGEING_S,
            tenant_weights=WEIGHTS,
            num_host_kv_blocks=limits.num_host_blocks,
            check_invariants=True,
        )
        self.engine = Engine(
            config, self.executor, clock=lambda: float(self.steps), recording=recording
        )

    def play(self) -> None:
        for event in self.scenario.events:
            for _ in range(event.steps_before):
                self._step()
            self._apply(event)
        self._run_dry()
        self._check_the_end()

    def _apply(self, event: Event) -> None:
        match event:
            case Submit():
                self.submits[event.name] = event
                self._take(self.engine.add(_request_of(event, arrival=float(self.steps))))
            case Abort(name=name):
                if name in self.submits and name not in self.ended:
                    self.aborted.add(name)
                self._take(self.engine.abort(name))
                if name in self.engine.scheduler.running:
                    raise SimulationError(f"{name} runs on after its abort")
            case UsePolicy(policy=policy):
                use_policy(self.engine, policy)
            case Resize(num_blocks=num_blocks):
                resize_kv_pool(self.engine, num_blocks)
                self._follow_resize(self.executor.resizes[-1])
            case FailStep():
                self._fail_next_step = self.engine.has_work
            case FailRow(name=name):
                if name in self.submits and name not in self.ended:
                    self.executor.fail_rows.add(name)
                    self.may_fail.add(name)
        self.engine.check()

    def _step(self) -> None:
        if not self.engine.has_work:
            return
        self.steps += 1
        failed_before = self.engine.stats().failed_steps
        self._take(self.engine.step())
        plan = self.executor.plans[-1]
        self._check_budget(plan)
        if self.engine.stats().failed_steps == failed_before:
            rows = {row.request_id for row in plan.rows}
            if self.executor.batch != rows:
                raise SimulationError(f"the executor keeps {self.executor.batch}, {rows} run")

    def _before_step(self, plan: StepPlan) -> None:
        self._check_admissions(plan)
        self._check_salts(plan)
        self._resized = False
        if self._fail_next_step:
            self._fail_next_step = False
            self.may_fail |= {row.request_id for row in plan.rows}
            raise RuntimeError("simulated device fault")

    def _check_admissions(self, plan: StepPlan) -> None:
        admitted = [admission.request_id for admission in plan.admitted]
        again = set(admitted) & set(plan.retired)
        if again and not self._resized:
            raise SimulationError(f"{again} lost their blocks and got new ones in one step")
        for waiting in self.engine.scheduler.waiting:
            for name in admitted:
                chosen = self.engine.scheduler.running[name]
                if waiting.request_id not in plan.retired and self._is_before(waiting, chosen):
                    raise SimulationError(f"{name} goes before {waiting.request_id}")

    def _is_before(self, first: Request, second: Request) -> bool:
        """Whether the policy in force says that `first` must be served before `second`."""
        arrived_first = first.sequence < second.sequence
        match self.engine.scheduler.roster.policy.name:
            case "fcfs":
                return arrived_first
            case "fair":
                return arrived_first and first.tenant == second.tenant
            case "deadline":
                return first.deadline < second.deadline or (
                    first.deadline == second.deadline and arrived_first
                )
            case _:
                waited_more = second.arrival_time - first.arrival_time
                levels = (first.priority - second.priority) * AGEING_S + waited_more
                return levels > 0 or (levels == 0 and arrived_first)

    def _check_salts(self, plan: StepPlan) -> None:
        """Whatever a request finds computed was computed under its own salt."""
        block_size = self.scenario.limits.block_size
        for copy in plan.copies:
            self._follow_salt(copy)
        for admission in plan.admitted:
            self._tables[admission.request_id] = []
        for row in plan.rows:
            table, salt = self._tables[row.request_id], self.submits[row.request_id].salt
            table += row.new_block_ids
            first = row.num_computed_tokens // block_size
            window = self.scenario.limits.window or row.num_computed_tokens + 1
            seen = max(row.num_computed_tokens - window + 1, 0) // block_size
            for block_id in table[seen:first]:
                if self._salt_of_block[block_id] != salt:
                    raise SimulationError(f"{row.request_id} reads a block of another salt")
            for block_id in table[first:]:
                self._salt_of_block[block_id] = salt

    def _follow_salt(self, copy: BlockCopy) -> None:
        source = self._salt_of_host_block if copy.kind is CopyKind.IN else self._salt_of_block
        target = self._salt_of_host_block if copy.kind is CopyKind.OUT else self._salt_of_block
        target[copy.target] = source[copy.source]

    def _follow_resize(self, change: PoolResize) -> None:
        self._resized = True
        for copy in change.copies:
            self._follow_salt(copy)
        for table in self._tables.values():
            table[:] = [change.moved.get(block_id, block_id) for block_id in table]

    def _check_budget(self, plan: StepPlan) -> None:
        """Once more from outside, where a mutated invariant cannot look away."""
        limits = self.scenario.limits
        if plan.num_tokens > limits.max_num_batched_tokens or len(plan.rows) > limits.max_num_seqs:
            raise SimulationError(f"step {plan.step} has {plan.num_tokens} tokens: over budget")

    def _run_dry(self) -> None:
        known = sum(len(s.prompt) + s.max_tokens for s in self.submits.values())
        # Each step computes a token at least. Preemption computes some again: allow tenfold.
        for _ in range(10 * known + 100):
            if not self.engine.has_work:
                return
            self._step()
        raise SimulationError(f"still at work after {self.steps} steps")

    def _take(self, events: list[TokenEvent]) -> None:
        for event in events:
            name = event.request_id
            if name in self.ended:
                raise SimulationError(f"{name} got an event after its last one")
            if name in self.aborted and event.token_ids:
                raise SimulationError(f"{name} got tokens after its abort")
            self.output.setdefault(name, []).extend(event.token_ids)
            if event.finish_reason is not None:
                self.ended[name] = event.finish_reason

    def _check_the_end(self) -> None:
        if missing := self.submits.keys() - self.ended.keys():
            raise SimulationError(f"{sorted(missing)} never ended")
        for name, submit in self.submits.items():
            self._check_output(name, submit)
        blocks = self.engine.scheduler.blocks
        while blocks.pins.drop_oldest():
            pass
        if blocks.pool.num_available != blocks.pool.num_blocks:
            raise SimulationError(f"{blocks.pool.num_in_use} blocks in use when all is done")
        if sum(self.engine.stats().finished.values()) != len(self.submits):
            raise SimulationError("the counts of endings disagree")

    def _check_output(self, name: str, submit: Submit) -> None:
        output, reason = self.output[name], self.ended[name]
        expected, expected_reason = expected_end(submit, self.scenario.limits.window)
        aborted = reason is FinishReason.ABORT and name in self.aborted
        if aborted or (reason is FinishReason.ERROR and name in self.may_fail):
            expected, expected_reason = expected[: len(output)], reason
        if output != expected or reason is not expected_reason:
            raise SimulationError(
                f"{name} ended with {reason.name} and {output},"
                f" alone with {expected_reason.name} and {expected}"
            )


def _request_of(submit: Submit, arrival: float) -> Request:
    return Request(
        request_id=submit.name,
        token_ids=list(submit.prompt),
        num_prompt_tokens=len(submit.prompt),
        params=SamplingParams(temperature=0.0, max_tokens=submit.max_tokens),
        max_tokens=submit.max_tokens,
        stop_token_ids=frozenset(submit.stop_token_ids),
        seed=0,
        arrival_time=arrival,
        cache_salt=submit.salt,
        priority=submit.priority,
        tenant=submit.tenant,
        deadline=submit.deadline,
        fork_of=submit.fork_of,
        pin_s=submit.pin_s,
    )


def run(scenario: Scenario) -> World:
    """Play it. Raises SimulationError, or whatever the code under test raises."""
    world = World(scenario)
    world.play()
    return world
