"""Sampled token ids: where the next step finds them, and how they reach the host. Engine thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cb_backend.core.step_io import StepResult
from cb_backend.errors import ErrorInfo, RequestFailedError
from cb_backend.runtime.staging import StagedStep
from cb_backend.runtime.streams import Reading

UNSOUND = -1  # in place of a token id: nothing could be drawn from the row
_NOT_FINITE = RequestFailedError(
    "the model's logits for this request are not finite numbers; the request was stopped, others"
    " are not affected"
)


class SampledIds:
    """The last sampled id of each row of the batch, on the device."""

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        self._ids = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)

    def fill(self, step: StagedStep) -> None:
        """Put what was sampled where a step's token ids were left open."""
        if len(step.sampled_tokens) == len(step.token_ids):  # all, in their order
            torch.index_select(self._ids, 0, step.sampled_rows, out=step.token_ids)
        elif len(step.sampled_tokens):
            ids = self._ids.index_select(0, step.sampled_rows)
            step.token_ids.index_copy_(0, step.sampled_tokens, ids)

    def keep(self, step: StagedStep, token_ids: Tensor) -> None:
        """What this step's sampling rows [R] have sampled."""
        # What an unsound row has sampled means nothing, but the next step may look it up.
        self._ids.index_copy_(0, step.batch_rows, token_ids.clamp(min=0))


class HostSampledIds:
    """The same on a CPU, by numpy: an operation of torch takes 50 us where a forward pass has just
    emptied the caches, one of numpy 10."""

    def __init__(self, max_num_seqs: int) -> None:
        self._ids = np.zeros(max_num_seqs, np.int64)

    def fill(self, step: StagedStep) -> None:
        """See `SampledIds.fill`."""
        inputs = step.inputs
        # On a CPU the step's tensor is this array.
        inputs.token_ids[inputs.sampled_tokens] = self._ids[inputs.sampled_rows]

    def keep(self, step: StagedStep, token_ids: Tensor) -> None:
        """See `SampledIds.keep`."""
        self._ids[step.inputs.batch_rows] = np.maximum(token_ids.numpy(), 0)


@dataclass(frozen=True, slots=True)
class SampledStep:
    """A launched step of a model; implements `core.step_io.PendingStep`."""

    request_ids: list[str]  # [R], of the rows that sample
    reading: Reading  # of their token ids, or `UNSOUND`

    def help(self) -> None:
        pass  # the host cannot

    def result(self) -> StepResult:
        # Also for a step that samples nothing: it is over then.
        return step_result(self.request_ids, self.reading.wait().tolist())


def step_result(request_ids: Sequence[str], tokens: Sequence[int]) -> StepResult:
    """Of the token ids, or `UNSOUND`, that these requests' rows have sampled."""
    token_ids: dict[str, tuple[int, ...]] = dict(
        zip(request_ids, zip(tokens, strict=False), strict=True)
    )
    failed: dict[str, ErrorInfo] = {}
    if UNSOUND in tokens:
        for request_id in [name for name, (token,) in token_ids.items() if token == UNSOUND]:
            del token_ids[request_id]
            failed[request_id] = _NOT_FINITE.info()
    return StepResult(token_ids, failed)
