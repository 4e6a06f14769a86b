"""An engine whose steps take what a cost model says, on a clock that only they move."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from pathlib import Path

from cb_backend.config import EngineConfig
from cb_backend.core.scheduler_limits import SchedulerLimits
from cb_backend.core.step_io import StepPlan
from cb_backend.engine.engine import Engine
from cb_backend.engine.recorder import open_recorder
from cb_backend.planning.cost_model import CostModel, StepWork
from cb_backend.planning.recording import Header
from cb_backend.planning.trace import Trace
from tests.fakes import ShadowExecutor, make_model_info, make_request

# A second a step and half a second a token, to count on one's fingers.
SIMPLE = CostModel((1.0, 0.5, 0.0, 0.0, 0.0))


def make_header(*, num_blocks: int = 64, block_size: int = 4, max_num_seqs: int = 8) -> Header:
    limits = SchedulerLimits(
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=64,
        max_prefill_chunk=32,
        enable_prefix_caching=True,
    )
    return Header(limits, "fcfs", 10.0, {}, None, {})


def serve_priced(
    trace: Trace,
    cost: CostModel,
    path: Path,
    *,
    runs_ahead: bool = False,
    helps: bool = False,
) -> dict[str, list[float]]:
    """Serve the trace with a real engine, recorded to `path`; when each request got something.
    `helps`: as on a CPU, whose host takes part in a step before it decides the next one."""
    clock = 0.0

    def take_time(plan: StepPlan) -> None:
        nonlocal clock
        clock += cost.step_seconds(StepWork.of_plan(plan))

    helped: set[int] = set()

    def help_with(plan: StepPlan) -> None:
        take_time(plan)
        helped.add(plan.step)

    def finish(plan: StepPlan) -> None:
        if plan.step not in helped:
            take_time(plan)

    info = make_model_info(num_blocks=256, block_size=4, runs_ahead=runs_ahead)
    executor = ShadowExecutor(
        dataclasses.replace(info, device="cpu" if helps else "fake"), before_step=finish
    )
    if helps:
        executor.helped = help_with
    engine = Engine(
        EngineConfig(model="priced", max_num_seqs=4, max_num_batched_tokens=64),
        executor,
        clock=lambda: clock,
        recording=open_recorder(str(path)),
    )
    coming, times = list(trace.requests), defaultdict(list)
    while coming or engine.has_work:
        engine.help()
        if not engine.has_work:
            clock = max(clock, coming[0][0].time)
        while coming and coming[0][0].time <= clock:
            arrival, end = coming.pop(0)
            prompt = [(7 * arrival.number + i) % 1000 for i in range(arrival.num_prompt_tokens)]
            request = make_request(
                arrival.request_id,
                prompt,
                max_tokens=end.num_output_tokens,
                arrival_time=arrival.time,
            )
            engine.add(request)
        for event in engine.step():
            times[event.request_id].append(event.time)
    engine.close()
    return times
