"""How many replicas a trace needs: each number of them is played and measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cb_backend.planning.cost_model import CostModel
from cb_backend.planning.recording import Header
from cb_backend.planning.trace import Trace
from cb_backend.planning.virtual_replica import VirtualReplica

SHARES = (50, 95, 99)  # the percentiles that are told


@dataclass(frozen=True, slots=True)
class Target:
    """What 95 of 100 first tokens, and 95 of 100 gaps between tokens, must keep."""

    ttft_s: float
    itl_s: float

    def __str__(self) -> str:
        return f"p95 TTFT <= {1e3 * self.ttft_s:g} ms and p95 ITL <= {1e3 * self.itl_s:g} ms"


@dataclass(frozen=True, slots=True)
class Prediction:
    """What so many replicas make of the trace."""

    num_replicas: int
    ttft_s: dict[int, float]  # by percentile
    itl_s: dict[int, float]
    output_tokens_per_s: float  # from the first arrival to the last token
    total_tokens_per_s: float  # prompts included

    def holds(self, target: Target) -> bool:
        return self.ttft_s[95] <= target.ttft_s and self.itl_s[95] <= target.itl_s


def predict(trace: Trace, header: Header, cost: CostModel, num_replicas: int) -> Prediction:
    """Arrivals go to the replicas in turn. Raises RecordingError if a request fits none."""
    served = [
        request
        for share in trace.split(num_replicas)
        for request in VirtualReplica(header, cost, trace.block_size).run(share)
    ]
    seconds = max(request.times[-1] for request in served) - trace.requests[0][0].time
    return Prediction(
        num_replicas=num_replicas,
        ttft_s=percentiles([request.ttft for request in served]),
        itl_s=percentiles([gap for request in served for gap in request.gaps]),
        output_tokens_per_s=trace.num_output_tokens / seconds,
        total_tokens_per_s=(trace.num_output_tokens + trace.num_prompt_tokens) / seconds,
    )


def fewest_that_hold(predictions: Sequence[Prediction], target: Target) -> int | None:
    """None: none of them holds."""
    holding = (p.num_replicas for p in predictions if p.holds(target))
    return min(holding, default=None)


def percentiles(values: Sequence[float]) -> dict[int, float]:
    """By nearest rank; zeros when there are no values, as of gaps where each answer is a token."""
    ordered = sorted(values)
    if not ordered:
        return dict.fromkeys(SHARES, 0.0)
    return {share: ordered[min(len(ordered) - 1, len(ordered) * share // 100)] for share in SHARES}
