"""A step between its launch and its end. Engine thread only."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from cb_backend.core.step_io import Executor, PendingStep, StepPlan, StepResult
from cb_backend.errors import ErrorInfo, RequestFailedError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """What is known of a step before its result is."""

    plan: StepPlan
    pending: PendingStep | ErrorInfo  # an error if it could not even be launched
    began: float  # seconds, the engine's clock, before it was scheduled
    num_preemptions: int  # since the start, with those that made room for it

    @property
    def has_failed(self) -> bool:
        return isinstance(self.pending, ErrorInfo)

    def help(self) -> None:
        if not isinstance(self.pending, ErrorInfo):
            self.pending.help()

    def result(self) -> StepResult | ErrorInfo:
        """Waits for the device."""
        if isinstance(self.pending, ErrorInfo):
            return self.pending
        try:
            return self.pending.result()
        except Exception:
            return failure(self.plan)


def launch(executor: Executor, plan: StepPlan) -> PendingStep | ErrorInfo:
    try:
        return executor.launch(plan)
    except Exception:
        return failure(plan)


def failure(plan: StepPlan) -> ErrorInfo:
    """What to tell the requests of a step that raised: whatever the model, the kernels or the
    device raise, it is these requests' end. The text stays in the log, since it may hold another
    user's data."""
    logger.exception("step %d failed with %d requests", plan.step, len(plan.rows))
    return RequestFailedError(f"the model failed in step {plan.step}").info()
