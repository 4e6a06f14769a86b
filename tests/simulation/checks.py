"""What must be true of every plan, seen from outside the scheduler that made it."""

from __future__ import annotations

from collections.abc import Mapping

from cb_backend.core.request import Request
from cb_backend.core.step_io import BlockCopy, CopyKind, PoolResize, StepPlan
from cb_backend.engine.engine import Engine
from tests.fakes import ShadowExecutor
from tests.simulation.scenario import AGEING_S, Scenario, Submit


class SimulationError(AssertionError):
    """Something that must hold did not."""


class PlanChecks:
    """Follows which salt's tokens lie in which block, and who should have gone before whom."""

    def __init__(self, scenario: Scenario, engine: Engine, submits: Mapping[str, Submit]) -> None:
        self.scenario = scenario
        self.engine = engine
        self.submits = submits
        self._salt_of_block: dict[int, str] = {}  # of the request that wrote it last
        self._salt_of_host_block: dict[int, str] = {}
        self._tables: dict[str, list[int]] = {}
        self._resized = False  # since the last step
        self._num_checked = 0  # plans

    def before_launch(self, plan: StepPlan) -> None:
        self._check_admissions(plan)
        self._check_salts(plan)
        self._check_ends(plan)
        self._resized = False

    def after_step(self, executor: ShadowExecutor, failed: bool) -> None:
        if len(executor.plans) == self._num_checked:
            return  # what was launched is still in flight
        self._num_checked = len(executor.plans)
        plan = executor.plans[-1]
        self._check_budget(plan)
        rows = {row.request_id for row in plan.rows}
        # Running ahead, a plan leaves out whose last token the one before it samples.
        before = executor.plans[-2:-1] if self.scenario.runs_ahead else []
        known = rows | {row.request_id for earlier in before for row in earlier.rows}
        if not failed and not rows <= executor.batch <= known:
            raise SimulationError(f"the executor keeps {executor.batch}, {rows} run")

    def follow_resize(self, change: PoolResize) -> None:
        self._resized = True
        for copy in change.copies:
            self._follow_salt(copy)
        for table in self._tables.values():
            table[:] = [change.moved.get(block_id, block_id) for block_id in table]

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

    def _check_ends(self, plan: StepPlan) -> None:
        """Nobody computes a last token: nothing is sampled from it."""
        for row in plan.rows:
            submit = self.submits[row.request_id]
            end = row.num_computed_tokens + row.num_scheduled_tokens
            if end >= len(submit.prompt) + submit.max_tokens:
                raise SimulationError(f"{row.request_id} computes its last token")

    def _follow_salt(self, copy: BlockCopy) -> None:
        source = self._salt_of_host_block if copy.kind is CopyKind.IN else self._salt_of_block
        target = self._salt_of_host_block if copy.kind is CopyKind.OUT else self._salt_of_block
        target[copy.target] = source[copy.source]

    def _check_budget(self, plan: StepPlan) -> None:
        """Once more from outside, where a mutated invariant cannot look away."""
        limits = self.scenario.limits
        if plan.num_tokens > limits.max_num_batched_tokens or len(plan.rows) > limits.max_num_seqs:
            raise SimulationError(f"step {plan.step} has {plan.num_tokens} tokens: over budget")
