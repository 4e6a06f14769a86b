"""`python -m cb_backend replay FILE` and `python -m cb_backend plan FILE`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from cb_backend.errors import CBError
from cb_backend.planning import report
from cb_backend.planning.capacity import Target, fewest_that_hold, predict
from cb_backend.planning.plan_inputs import MEASURED, plan_inputs
from cb_backend.planning.recording import read_recording
from cb_backend.planning.replay import Replay
from cb_backend.planning.trace import parse_range


def main(arguments: list[str] | None = None) -> int:
    """0: as asked. 1: a difference, or a target that is not met. 2: what was asked is wrong."""
    chosen = _parser().parse_args(arguments)
    try:
        code: int = chosen.run(chosen)
    except CBError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 2
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m cb_backend")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    replay = commands.add_parser(
        "replay", help="play a recording on the scheduler of this version, compare every decision"
    )
    replay.add_argument("file", type=Path, metavar="FILE", help="what `record` wrote")
    replay.set_defaults(run=_replay)
    plan = commands.add_parser(
        "plan", help="say how many replicas a trace needs at a target, by playing it on each number"
    )
    plan.add_argument("file", type=Path, nargs="?", metavar="FILE", help="what `record` wrote")
    plan.add_argument(
        "--synthetic",
        metavar="SPEC",
        help="a drawn trace instead, as rate=4,requests=200,prompt=16..256,output=16..192,shared=0",
    )
    plan.add_argument("--ttft-ms", type=_positive, required=True, help="target of the p95 TTFT")
    plan.add_argument("--itl-ms", type=_positive, required=True, help="target of the p95 ITL")
    plan.add_argument(
        "--replicas", type=parse_range, default=(1, 8), metavar="1..N", help="default 1..8"
    )
    plan.add_argument(
        "--profile",
        default=MEASURED,
        metavar="FILE",
        help="what steps cost: prices as JSON, or a recording to fit to; default: FILE's own steps",
    )
    plan.add_argument("--plot", type=Path, metavar="PNG", help="draw it; needs matplotlib")
    plan.set_defaults(run=_plan)
    return parser


def _replay(chosen: argparse.Namespace) -> int:
    replayed = Replay(read_recording(chosen.file)).play()
    if replayed.difference:
        print(f"{replayed.num_steps} steps identical, then {replayed.difference}")
        return 1
    print(f"{replayed.num_steps} steps identical")
    return 0


def _plan(chosen: argparse.Namespace) -> int:
    if chosen.plot is not None:
        from cb_backend.planning import plot  # before the work: it may be missing
    inputs = plan_inputs(chosen.file, chosen.synthetic, chosen.profile)
    target = Target(chosen.ttft_ms / 1e3, chosen.itl_ms / 1e3)
    print(report.describe_trace(inputs.trace))
    print(report.describe_cost(inputs.cost))
    print("arrivals go to the replicas in turn; times are in ms")
    print(report.HEADINGS)
    predictions = []
    first, last = chosen.replicas
    for num_replicas in range(first, last + 1):
        predictions.append(predict(inputs.trace, inputs.header, inputs.cost, num_replicas))
        print(report.row(predictions[-1], target), flush=True)
    print(report.answer(predictions, target))
    if chosen.plot is not None:
        plot.draw(chosen.plot, predictions, target)
    return 0 if fewest_that_hold(predictions, target) is not None else 1


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise ValueError(text)
    return value


if __name__ == "__main__":
    sys.exit(main())
