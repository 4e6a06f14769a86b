"""Steps of a CPU: its workers compute one while the engine thread does the host's part of others.

One that is launched while another is under way waits for that one's tokens, and begins as soon as
they are here, before the host has any of its work with them. Engine thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from cb_backend.core.step_io import BlockCopy, StepResult
from cb_backend.runtime.block_copier import BlockCopier
from cb_backend.runtime.forward_pass import ForwardPass
from cb_backend.runtime.sampled_ids import HostSampledIds, step_result
from cb_backend.runtime.staging import StagedStep
from cb_backend.runtime.step_inputs import StepInputs


class HostSteps:
    """Launches steps of a model that can `prepare` them."""

    def __init__(
        self,
        forward_pass: ForwardPass,
        copier: BlockCopier,
        sampled: HostSampledIds,
        tokens_of: Callable[[StagedStep, Tensor], Tensor],
    ) -> None:
        """`tokens_of` samples from a step's logits."""
        self.forward_pass = forward_pass
        self.copier = copier
        self.sampled = sampled
        self.tokens_of = tokens_of
        self.under_way: HostStep | None = None
        self._last: HostStep | None = None

    def launch(self, inputs: StepInputs, copies: Sequence[BlockCopy]) -> HostStep:
        step = HostStep(self, self.forward_pass.stage(inputs), copies)
        if self._last is None or self._last.is_over:
            step.begin()
        else:
            self._last.behind = step
        self._last = step
        return step

    def forget(self) -> None:
        """With no step in flight: the last one's memory is let go of, the pool among it."""
        self._last = None

    def close(self) -> None:
        """Nothing is under way afterwards."""
        if self.under_way is not None:
            self.under_way.abandon()


class HostStep:
    """Implements `core.step_io.PendingStep`."""

    def __init__(self, steps: HostSteps, staged: StagedStep, copies: Sequence[BlockCopy]) -> None:
        inputs = staged.inputs
        self.is_over = False
        self.behind: HostStep | None = None  # launched meanwhile
        self._steps = steps
        self._staged = staged
        self._copies = copies
        self._only_best = not inputs.sampling.draws and inputs.edits is None
        self._run = steps.forward_pass.prepare(staged, only_best=self._only_best)
        self._has_begun = False
        self._error: Exception | None = None

    def begin(self) -> None:
        """What it raises is for who asks for the result."""
        self._has_begun = True
        try:
            if self._copies:
                with torch.inference_mode():
                    self._steps.copier.run(self._copies)
            self._steps.sampled.fill(self._staged)
            self._run.begin()
            self._steps.under_way = self
        except Exception as error:
            self._error = error

    def help(self) -> None:
        if self._has_begun:
            self._run.help()

    def result(self) -> StepResult:
        if not self._has_begun:  # the one before has failed
            self.begin()
        self.is_over, self._steps.under_way = True, None
        if self._error is not None:
            raise self._error
        tokens = self._run.result()
        if not self._only_best:
            with torch.inference_mode():
                tokens = self._steps.tokens_of(self._staged, tokens)
        self._steps.sampled.keep(self._staged, tokens)
        if self.behind is not None:  # nobody computes until this
            self.behind.begin()
        return step_result(self._staged.inputs.request_ids, tokens.tolist())

    def abandon(self) -> None:
        self._run.result()
