"""The plan in words."""

from __future__ import annotations

from collections.abc import Sequence

from cb_backend.planning.capacity import SHARES, Prediction, Target, fewest_that_hold
from cb_backend.planning.cost_model import FEATURES, CostModel
from cb_backend.planning.trace import Trace

HEADINGS = (
    "replicas"
    + "".join(f"{f'TTFT p{share}':>11}" for share in SHARES)
    + "".join(f"{f'ITL p{share}':>9}" for share in SHARES)
    + f"{'output tok/s':>14}{'total tok/s':>13}"
)


def describe_trace(trace: Trace) -> str:
    rate = len(trace.requests) / trace.seconds if trace.seconds else float("inf")
    text = (
        f"trace: {len(trace.requests)} requests in {trace.seconds:.1f} s ({rate:.2f} a second),"
        f" {trace.num_prompt_tokens} prompt and {trace.num_output_tokens} output tokens"
    )
    if trace.num_left_out:
        text += f"; {trace.num_left_out} that got no output are left out"
    return text


def describe_cost(cost: CostModel) -> str:
    prices = [
        f"{1e6 * price:.4g} us a {name.removesuffix('s').replace('_', ' ')}"
        for name, price in zip(FEATURES, cost.seconds, strict=True)
        if price
    ]
    between = f", {1e6 * cost.between_s:.4g} us between steps" if cost.between_s else ""
    return f"a step costs {' + '.join(prices)}{between} ({cost.source})"


def row(prediction: Prediction, target: Target) -> str:
    """Under HEADINGS; milliseconds."""
    text = f"{prediction.num_replicas:8d}"
    text += "".join(f"{1e3 * prediction.ttft_s[share]:11.1f}" for share in SHARES)
    text += "".join(f"{1e3 * prediction.itl_s[share]:9.1f}" for share in SHARES)
    text += f"{prediction.output_tokens_per_s:14.1f}{prediction.total_tokens_per_s:13.1f}"
    return text + ("  holds" if prediction.holds(target) else "")


def answer(predictions: Sequence[Prediction], target: Target) -> str:
    fewest = fewest_that_hold(predictions, target)
    if fewest is not None:
        return f"{fewest} replica{'s' if fewest > 1 else ''} hold{'s' * (fewest == 1)} {target}"
    most = max(prediction.num_replicas for prediction in predictions)
    missed = [
        name
        for name, best, wanted in (
            ("TTFT", min(p.ttft_s[95] for p in predictions), target.ttft_s),
            ("ITL", min(p.itl_s[95] for p in predictions), target.itl_s),
        )
        if best > wanted
    ]
    verb = "stay" if len(missed) > 1 else "stays"
    why = f"; {' and '.join(missed)} {verb} above" if missed else ""
    return f"up to {most} replicas do not hold {target}{why}"
