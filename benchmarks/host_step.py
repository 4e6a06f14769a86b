"""What the host does for a decoding step, and how long each part of it takes.

All of it is the engine's own, down to the tensors that a device would read and the ids that it
would send back; only the model is not there. A step is launched while the one before is in flight,
as on a GPU.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import cheap
import numpy as np
import torch

from cb_backend.config import EngineConfig
from cb_backend.core.rates import StepRates
from cb_backend.core.scheduler import Scheduler
from cb_backend.core.step_io import PendingStep, StepPlan, TokenEvent
from cb_backend.engine.engine import Engine
from cb_backend.engine.output_queue import OutputQueue
from cb_backend.engine.stats import StatsRecorder
from cb_backend.runtime import staging
from cb_backend.runtime.sampled_ids import UNSOUND, SampledIds, SampledStep
from cb_backend.runtime.streams import HostStreams
from cb_backend.runtime.token_batch import TokenBatch

NUM_STEPS = 300

# Which methods make up a phase, in the order of a step.
PHASES: dict[str, list[tuple[Any, str]]] = {
    "schedule": [(Scheduler, "schedule")],
    "batch": [(TokenBatch, "apply")],
    "staging": [(staging, "stage")],
    "ids": [(SampledIds, "fill"), (SampledIds, "keep"), (HostStreams, "read")],
    "result": [(SampledStep, "result")],
    "update": [(Scheduler, "update")],
    "stats": [
        (StatsRecorder, "record_step"),
        (StatsRecorder, "record_events"),
        (StepRates, "observe"),
    ],
    "publish": [(OutputQueue, "publish")],
}


class WithoutModel(cheap.CheapExecutor):
    """The model runner's way of a step, with one token for all in place of logits."""

    def __init__(self, max_num_seqs: int) -> None:
        super().__init__(runs_ahead=True)
        self._batch = TokenBatch(
            max_num_seqs=max_num_seqs,
            max_model_len=cheap.MAX_MODEL_LEN,
            block_size=cheap.BLOCK_SIZE,
            vocab_size=cheap.TOKEN + 1,
        )
        self._streams = HostStreams()
        self._sampled = SampledIds(max_num_seqs, torch.device("cpu"))
        self._tokens = torch.full((max_num_seqs,), cheap.TOKEN)
        self._sound = torch.ones(max_num_seqs, dtype=torch.bool)

    def launch(self, plan: StepPlan) -> PendingStep:
        inputs = self._batch.apply(plan)
        with torch.inference_mode():
            step = staging.stage(inputs, self._streams, for_triton=True)
            self._sampled.fill(step)
            num = len(inputs.request_ids)
            sampled = self._tokens[:num].where(self._sound[:num], UNSOUND)
            self._sampled.keep(step, sampled)
            return SampledStep(inputs.request_ids, self._streams.read(sampled))


class Reader:
    """A receiver that reads nothing."""

    def deliver(self, events: Sequence[TokenEvent]) -> bool:
        return True


def measure(num_running: int) -> dict[str, float]:
    """Microseconds of a step, of this thread's CPU: in all, and of each phase. Medians."""
    engine, queue = _started(num_running)

    def step() -> None:
        queue.publish(engine.step())

    while any(request.num_output_tokens < 2 for request in engine.scheduler.running.values()):
        step()
    whole = [_seconds(step) for _ in range(NUM_STEPS)]
    parts: dict[str, list[float]] = {phase: [] for phase in PHASES}
    with ExitStack() as stack:
        taken: dict[str, float] = defaultdict(float)
        for phase, methods in PHASES.items():
            for owner, name in methods:
                timed = _timed(getattr(owner, name), phase, taken)
                stack.enter_context(patch.object(owner, name, timed))
        for _ in range(NUM_STEPS):
            taken.clear()
            step()
            for phase in PHASES:
                parts[phase].append(taken[phase])
    assert len(engine.scheduler.running) == num_running
    medians = {phase: float(1e6 * np.median(seconds)) for phase, seconds in parts.items()}
    total = float(1e6 * np.median(whole))
    return {"step": total, **medians, "rest": total - sum(medians.values())}


def _started(num_running: int) -> tuple[Engine, OutputQueue]:
    """With so many requests that do not end, whose blocks are full at different times."""
    config = EngineConfig(
        model="cheap", max_num_seqs=num_running, max_num_batched_tokens=16 * num_running
    )
    engine = Engine(config, WithoutModel(num_running), time.monotonic)
    queue, reader, rng = OutputQueue(), Reader(), random.Random(0)
    for number in range(num_running):
        num_prompt = rng.randint(100, 1000)
        request = cheap.make_request(number, rng, num_prompt, cheap.MAX_MODEL_LEN - num_prompt)
        queue.register(request.request_id, reader)
        engine.add(request)
    while engine.scheduler.waiting:
        queue.publish(engine.step())
    return engine, queue


def _timed(method: Callable[..., Any], phase: str, taken: dict[str, float]) -> Callable[..., Any]:
    def timed(*args: Any, **kwargs: Any) -> Any:
        started = time.thread_time()
        result = method(*args, **kwargs)
        taken[phase] += time.thread_time() - started
        return result

    return timed


def _seconds(step: Callable[[], None]) -> float:
    started = time.thread_time()
    step()
    return time.thread_time() - started
