"""What a plan starts from: a trace, the engine that each replica is, and what its steps cost."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from cb_backend.core.recorded_step import Json
from cb_backend.core.scheduler_limits import SchedulerLimits
from cb_backend.errors import ConfigError, RecordingError
from cb_backend.planning.cost_model import CostModel, fit, read_profile
from cb_backend.planning.recording import Header, Recording, read_recording
from cb_backend.planning.trace import Trace, parse_synthetic, trace_of

MEASURED = "measured"  # the profile that is fitted to the recording itself

# An engine's own defaults, for a profile that does not say otherwise.
_DEFAULT_LIMITS: Json = {
    "block_size": 16,
    "max_num_seqs": 64,
    "max_num_batched_tokens": 512,
    "max_prefill_chunk": 256,
    "enable_prefix_caching": True,
}


@dataclass(frozen=True, slots=True)
class PlanInputs:
    trace: Trace
    header: Header  # limits and policy of each replica
    cost: CostModel


def plan_inputs(file: Path | None, synthetic: str | None, profile: str) -> PlanInputs:
    """`profile` is MEASURED, a recording to fit to, or a JSON file of prices and limits.

    Raises ConfigError when these do not make a plan, RecordingError for what a file holds.
    """
    if (file is None) == (synthetic is None):
        raise ConfigError("a plan needs a recording or --synthetic, one of the two")
    recording = None if file is None else read_recording(file)
    if profile != MEASURED:
        header, cost = _from_profile(Path(profile), recording)
    elif recording is not None:
        header, cost = recording.header, fit(recording)
    else:
        raise ConfigError(
            "--synthetic needs --profile: a recording to fit a cost model to, or a file of prices"
        )
    if recording is not None:
        return PlanInputs(trace_of(recording), header, cost)
    drawn = parse_synthetic(synthetic or "").draw(header.limits.block_size)
    return PlanInputs(drawn, header, cost)


def _from_profile(path: Path, recording: Recording | None) -> tuple[Header, CostModel]:
    if _is_recording(path):
        measured = read_recording(path)
        return measured.header, fit(measured)
    cost, overrides = read_profile(path)
    header = _DEFAULT_HEADER if recording is None else recording.header
    names = {field.name for field in dataclasses.fields(SchedulerLimits)}
    if unknown := overrides.keys() - names:
        raise RecordingError(f"{path} limits {', '.join(sorted(unknown))}, which nothing does")
    if recording is None and "num_blocks" not in overrides:
        raise RecordingError(f"{path} must say in its limits how many num_blocks the device holds")
    limits = dataclasses.replace(header.limits, **overrides)
    return dataclasses.replace(header, limits=limits), cost


def _is_recording(path: Path) -> bool:
    try:
        with path.open() as lines:
            return '"kind"' in lines.readline()
    except (OSError, UnicodeDecodeError):
        return False  # whoever reads it next says so


_DEFAULT_HEADER = Header(
    limits=SchedulerLimits(num_blocks=1, **_DEFAULT_LIMITS),
    policy="fcfs",
    priority_ageing_s=10.0,
    tenant_weights={},
    target_itl_s=None,
    model={},
)
