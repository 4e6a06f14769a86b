"""A model runner of random weights, and requests that it serves: what needs no engine around it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest.mock import patch

import torch
from torch import Tensor

from cb_backend.config import EngineConfig
from cb_backend.core.sampling_params import SamplingParams
from cb_backend.core.step_io import Admission, ModelInfo, ScheduledRow, StepPlan, StepRows
from cb_backend.core.swap_costs import COPYING_IS_FREE
from cb_backend.runtime.cuda_graphs import CudaGraphMaker
from cb_backend.runtime.model_runner import ModelRunner
from cb_backend.runtime.models.decoder import Decoder
from cb_backend.runtime.rehearsal import warm_up
from cb_backend.runtime.staging import StagedStep
from gpu_check.kernels import BLOCK_SIZE

_GREEDY = SamplingParams(temperature=0.0)

# Logits of a sampled token, by its request and place.
Logits = dict[tuple[str, int], Tensor]


def make_runner(
    model: Decoder,
    device: torch.device,
    *,
    num_seqs: int,
    max_len: int,
    deterministic: bool = False,
    graphs: bool = False,
) -> ModelRunner:
    """`deterministic`: as the model was made."""
    info = ModelInfo(
        model_name="random",
        vocab_size=model.geometry.vocab_size,
        max_model_len=max_len,
        eos_token_ids=(),
        num_blocks=num_seqs * -(-max_len // BLOCK_SIZE),
        block_size=BLOCK_SIZE,
        swap_costs=COPYING_IS_FREE,
        bytes_per_block=0,
        window=None,
        device=str(device),
        dtype=str(model.dtype),
        attention="",
        implementation="native",
        runs_ahead=False,
    )
    settings = EngineConfig(
        model=info.model_name,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=max(512, num_seqs),
        deterministic=deterministic,
    )
    with torch.inference_mode():
        runner = ModelRunner(model, info, settings, device)
    warm_up(runner)
    if graphs and device.type == "cuda":
        runner.capture_graphs(CudaGraphMaker(), num_seqs)
    return runner


@dataclass(slots=True)
class _Running:
    token_ids: list[int]
    num_prompt_tokens: int
    blocks: tuple[int, ...]
    num_computed: int = 0
    is_admitted: bool = False


@dataclass(slots=True)
class Served:
    """What serving took."""

    seconds: float = 0.0
    num_output_tokens: int = 0
    outputs: dict[str, list[int]] = field(default_factory=dict)
    host_seconds: list[float] = field(default_factory=list)  # of decoding steps, without waiting

    @property
    def host_microseconds(self) -> float:
        return statistics.median(self.host_seconds) * 1e6


def serve(
    runner: ModelRunner,
    prompts: Mapping[str, Sequence[int]],
    num_tokens: int,
    *,
    budget: int = 8192,  # tokens of a step
) -> Served:
    """All at once; each leaves with its `num_tokens`."""
    width = -(-(max(map(len, prompts.values())) + num_tokens) // BLOCK_SIZE)
    live = {
        name: _Running(list(prompt), len(prompt), tuple(range(i * width, (i + 1) * width)))
        for i, (name, prompt) in enumerate(prompts.items())
    }
    served, start = Served(), time.perf_counter()
    retired: tuple[str, ...] = ()
    while live:
        began = time.perf_counter()
        plan = _plan(live, retired, budget)
        step = runner.launch(plan)
        if plan.num_tokens == len(plan.rows):
            served.host_seconds.append(time.perf_counter() - began)
        result = step.result()
        done = []
        for row in plan.rows:
            request = live[row.request_id]
            request.num_computed += row.num_scheduled_tokens
            request.token_ids += result.token_ids.get(row.request_id, ())
            if len(request.token_ids) - request.num_prompt_tokens >= num_tokens:
                done.append(row.request_id)
                served.outputs[row.request_id] = request.token_ids[request.num_prompt_tokens :]
        for name in done:
            del live[name]
        retired = tuple(done)
    runner.launch(StepPlan(0, retired, ()))
    served.seconds = time.perf_counter() - start
    served.num_output_tokens = num_tokens * len(prompts)
    return served


def _plan(live: dict[str, _Running], retired: tuple[str, ...], budget: int) -> StepPlan:
    rows, admitted = [], []
    for name, request in live.items():
        count = min(len(request.token_ids) - request.num_computed, budget)
        if count == 0:
            continue
        budget -= count
        new_blocks: tuple[int, ...] = ()
        if not request.is_admitted:
            request.is_admitted, new_blocks = True, request.blocks
            ids = tuple(request.token_ids)
            admitted.append(Admission(name, ids, len(ids), 0, _GREEDY, 0))
        samples = request.num_computed + count == len(request.token_ids)
        rows.append(ScheduledRow(name, request.num_computed, count, new_blocks, samples))
    return StepPlan(0, retired, tuple(admitted), StepRows.of(*rows))


@contextmanager
def recorded_logits(runner: ModelRunner) -> Iterator[Logits]:
    """Of all rows that are sampled from meanwhile. A request is what stands before the "/" of an
    id, so that one that is served several ways has one name."""
    forward, logits = runner._forward_pass.logits, Logits()

    def recorded(step: StagedStep) -> Tensor:
        rows, inputs = forward(step), step.inputs
        positions = inputs.sampling.positions.tolist()
        for request_id, position, row in zip(inputs.request_ids, positions, rows, strict=True):
            logits[request_id.partition("/")[0], position] = row.clone()
        return rows

    with (
        patch.object(runner._forward_pass, "logits", recorded),
        patch.object(runner, "_host_steps", None),  # which do not go that way
    ):
        yield logits
