"""Sampled token ids: where the next step finds them, and how they reach the host. Engine thread."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cb_backend.core.step_io import StepResult
from cb_backend.errors import ErrorInfo, RequestFailedError
from cb_backend.runtime.token_batch import Ints, StepInputs


class SampledIds:
    """The last sampled id of each row of the batch, on the device."""

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        self._ids = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)

    def fill(self, token_ids: Tensor, inputs: StepInputs) -> Tensor:
        """Put what was sampled where a step's `token_ids` [T] were left open."""
        if len(inputs.sampled_tokens):
            ids = self._ids[self._index(inputs.sampled_rows)]
            token_ids.index_copy_(0, self._index(inputs.sampled_tokens), ids)
        return token_ids

    def keep(self, inputs: StepInputs, token_ids: Tensor, sound: Tensor) -> None:
        """What this step's sampling rows have sampled."""
        # What an unsound row has sampled means nothing, but the next step may look it up.
        ids = token_ids.masked_fill(~sound, 0)
        self._ids.index_copy_(0, self._index(inputs.batch_rows), ids)

    def _index(self, rows: Ints) -> Tensor:
        return torch.from_numpy(rows).to(self._ids.device)


class HostCopy:
    """Tensors of a device on their way to the host, behind all that was launched there. To wait
    for them is the one point where the host waits for the device in a step."""

    def __init__(self, device: torch.device, *tensors: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._tensors = tensors
        if device.type == "cuda":
            self._tensors = tuple(_begin_copy(tensor) for tensor in tensors)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def wait(self) -> tuple[Tensor, ...]:
        """The tensors, on the host."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensors


def _begin_copy(tensor: Tensor) -> Tensor:
    # Page-locked, or the copy would wait for the device at once.
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


@dataclass(frozen=True, slots=True)
class SampledStep:
    """A launched step of a model; implements `core.step_io.PendingStep`."""

    request_ids: list[str]  # [R], of the rows that sample
    copy: HostCopy  # of their token ids [R] and of which of them are sound [R], if there are any

    def result(self) -> StepResult:
        copied = self.copy.wait()  # also for a step that samples nothing: it is over then
        if not self.request_ids:
            return StepResult(token_ids={}, failed={})
        tokens, sound = (tensor.tolist() for tensor in copied)
        token_ids: dict[str, tuple[int, ...]] = {}
        failed: dict[str, ErrorInfo] = {}
        for request_id, token, is_sound in zip(self.request_ids, tokens, sound, strict=True):
            if is_sound:
                token_ids[request_id] = (token,)
            else:
                error = RequestFailedError(
                    "the model's logits for this request are not finite numbers; the request was"
                    " stopped, others are not affected"
                )
                failed[request_id] = error.info()
        return StepResult(token_ids, failed)
