"""`make gpu-check`: the kernels, and models made of them, on this machine's GPU.

    python -m gpu_check [--out FOLDER] [--seconds S] [--dry-run]

Prints what is wrong, how fast it serves beside transformers, then the table of times; writes
gpu_check.json and a plot. Ends with 1 if anything is wrong. What does not fit into --seconds is
left out, by name. A dry run takes the CPU and tiny sizes: it tests this program alone, and only
where Triton is interpreted are there kernels in it.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import platform
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from gpu_check import behaviour, experts, kernels, linear, models, peer, sanitizer
from gpu_check.budget import TimeBudget
from gpu_check.report import Speed, write_plot
from gpu_check.timing import (
    copy_bytes_per_second,
    flops_per_second,
    host_seconds,
    num_copies,
    seconds_per_call,
)

# Of the whole, for the parts that cannot stop in the middle. The rest, a table row after row, can.
_SECONDS_TO_SANITIZE = 90.0
_SECONDS_TO_COMPARE = 150.0
_TIMED = (kernels.timed, linear.timed, experts.timed, models.timed)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="gpu_check", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--seconds", type=float, default=450.0)
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args(arguments)
    if not options.dry_run and not torch.cuda.is_available():
        print("gpu-check: torch sees no GPU here (--dry-run tests the program without one)")
        return 2
    budget = TimeBudget(options.seconds)
    device = torch.device("cpu" if options.dry_run else "cuda")
    model = kernels.TINY if options.dry_run else kernels.Model()
    result: dict[str, Any] = {"machine": describe(device)}
    print(json.dumps(result["machine"]))
    errors = wrong_kernels(model, device, budget)
    fine = "every kernel agrees with float64, models with transformers, steps with each other"
    print(*(errors or [fine]), sep="\n", flush=True)
    if device.type == "cuda" and budget.allows("compute-sanitizer", _SECONDS_TO_SANITIZE):
        result["compute_sanitizer"], found = sanitizer.run(_SECONDS_TO_SANITIZE)
        print(f"compute-sanitizer: {result['compute_sanitizer']}", *found, sep="\n", flush=True)
        errors += found
    if budget.allows("comparison with transformers", _SECONDS_TO_COMPARE):
        result["serving"] = compared(model, device, errors)
    speeds = timed(model, device, budget, errors, result)
    result["speeds"] = [{**dataclasses.asdict(speed), "share": speed.share} for speed in speeds]
    result |= {"wrong": errors, "left_out": budget.left_out}
    for name in budget.left_out:
        print(f"left out for want of time: {name}")
    (options.out / "gpu_check.json").write_text(json.dumps(result, indent=1) + "\n")
    title = f"{result['machine']['device']}: share of the least time"
    print(f"plot: {write_plot(options.out, title, speeds)}")
    return 1 if errors else 0


def compared(
    model: kernels.Model, device: torch.device, errors: list[str]
) -> list[dict[str, float]]:
    """256 short requests, for the host's time a step, and fewer long ones."""
    sizes = [(2, 4, 2)] if model is kernels.TINY else [(256, 128, 32), (32, 1024, 64)]
    results = []
    for requests, prompt, output in sizes:
        try:
            comparison = peer.compare(
                model, device, num_requests=requests, num_prompt=prompt, num_output=output
            )
        except Exception as error:  # the rest is still worth knowing
            errors.append(f"serving {requests} requests: {error!r}")
            print(errors[-1], flush=True)
            continue
        results.append(dataclasses.asdict(comparison))
        print(comparison, flush=True)
    return results


def timed(
    model: kernels.Model,
    device: torch.device,
    budget: TimeBudget,
    errors: list[str],
    result: dict[str, Any],
) -> list[Speed]:
    is_tiny = model is kernels.TINY
    bandwidth = copy_bytes_per_second(device, 2**20 if is_tiny else 2**30)
    flops = flops_per_second(device, 64 if is_tiny else 8192)
    print(f"copy {bandwidth / 1e12:.2f} TB/s, bfloat16 product {flops / 1e12:.0f} TFLOP/s")
    result |= {"copy_bytes_per_second": bandwidth, "bfloat16_flops_per_second": flops}
    speeds = []
    scale = 4096 if is_tiny else 1
    # The generators make what their cases share, some of it large: one after the other.
    for case in chain(*(make(model, device, scale=scale) for make in _TIMED)):
        if not budget.allows(f"{case.kernel} {case.shape}"):
            continue
        try:
            runs = [case.make() for _ in range(num_copies(case.num_bytes, device))]
            seconds, on_host = seconds_per_call(runs, device), host_seconds(runs[0], device)
        except Exception as error:  # the others are still worth knowing
            errors.append(f"{case.kernel} {case.shape}: {error!r}")
            print(errors[-1], flush=True)
            continue
        speeds.append(Speed.of(case, seconds, on_host, bandwidth=bandwidth, flops=flops))
        print(speeds[-1], flush=True)
    return speeds


def describe(device: torch.device) -> dict[str, str]:
    """What the numbers depend on."""
    is_cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if is_cuda else "CPU (a dry run)",
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in ("torch", "triton", "transformers")},
    }


def wrong_kernels(model: kernels.Model, device: torch.device, budget: TimeBudget) -> list[str]:
    """A line for each kernel, model or promise that is not kept, or that fails."""
    lines = []
    tiny = model is kernels.TINY
    cases = chain(
        kernels.correct(model, device),
        linear.correct(model, device),
        experts.correct(model, device),
        models.correct(device, tiny=tiny),
        behaviour.correct(device, tiny=tiny),
    )
    for case in cases:
        name = f"{case.kernel} {case.shape}"
        if not budget.allows(name):
            continue
        try:
            actual = case.run().double().cpu()
            expected = case.expected().cpu()
        except Exception as error:  # the others are still worth knowing
            lines.append(f"{name}: {error!r}")
            continue
        excess = ((actual - expected).abs() / expected.abs().clamp(min=case.least)).max().item()
        if not excess <= case.tolerance:
            lines.append(f"{name}: off by {excess:.2e}, at most {case.tolerance:.2e}")
    return lines


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
