"""`make gpu-check`: the kernels, and models made of them, on this machine's GPU.

    python -m gpu_check [--out FOLDER] [--dry-run]

Prints what is wrong, then the table of times; writes gpu_check.json and gpu_check.svg. Ends with 1
if a kernel is wrong. A dry run takes the CPU and tiny sizes: it tests this program alone, and only
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

import torch

from gpu_check import kernels, models
from gpu_check.report import Speed, svg
from gpu_check.timing import (
    copy_bytes_per_second,
    flops_per_second,
    host_seconds,
    num_copies,
    seconds_per_call,
)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="gpu_check", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args(arguments)
    if not options.dry_run and not torch.cuda.is_available():
        print("gpu-check: torch sees no GPU here (--dry-run tests the program without one)")
        return 2
    device = torch.device("cpu" if options.dry_run else "cuda")
    model = kernels.TINY if options.dry_run else kernels.Model()
    machine = describe(device)
    print(json.dumps(machine))
    errors = wrong_kernels(model, device)
    fine = "every kernel agrees with float64, and the models with transformers"
    print(*(errors or [fine]), sep="\n")
    bandwidth = copy_bytes_per_second(device, 2**20 if options.dry_run else 2**30)
    flops = flops_per_second(device, 64 if options.dry_run else 8192)
    print(f"copy {bandwidth / 1e12:.2f} TB/s, bfloat16 product {flops / 1e12:.0f} TFLOP/s")
    speeds = []
    scale = 4096 if options.dry_run else 1
    cases = (kernels.timed(model, device, scale=scale), models.timed(model, device, scale=scale))
    for case in chain(*cases):
        try:
            runs = [case.make() for _ in range(num_copies(case.num_bytes, device))]
            seconds, on_host = seconds_per_call(runs, device), host_seconds(runs[0], device)
        except Exception as error:  # the others are still worth knowing
            errors.append(f"{case.kernel} {case.shape}: {error!r}")
            print(errors[-1], flush=True)
            continue
        speeds.append(Speed.of(case, seconds, on_host, bandwidth=bandwidth, flops=flops))
        print(speeds[-1], flush=True)
    write(options.out, machine, bandwidth, flops, errors, speeds)
    return 1 if errors else 0


def describe(device: torch.device) -> dict[str, str]:
    """What the numbers depend on."""
    is_cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if is_cuda else "CPU (a dry run)",
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in ("torch", "triton", "transformers")},
    }


def wrong_kernels(model: kernels.Model, device: torch.device) -> list[str]:
    """A line for each kernel that is not right, or that fails."""
    lines = []
    tiny = model is kernels.TINY
    for case in chain(kernels.correct(model, device), models.correct(device, tiny=tiny)):
        name = f"{case.kernel} {case.shape}"
        try:
            actual = case.run().double().cpu()
        except Exception as error:  # the others are still worth knowing
            lines.append(f"{name}: {error!r}")
            continue
        expected = case.expected().cpu()
        excess = ((actual - expected).abs() / expected.abs().clamp(min=case.least)).max().item()
        if not excess <= case.tolerance:
            lines.append(f"{name}: off by {excess:.2e}, at most {case.tolerance:.2e}")
    return lines


def write(
    folder: Path,
    machine: dict[str, str],
    bandwidth: float,
    flops: float,
    errors: list[str],
    speeds: list[Speed],
) -> None:
    result = {
        "machine": machine,
        "copy_bytes_per_second": bandwidth,
        "bfloat16_flops_per_second": flops,
        "wrong": errors,
        "speeds": [{**dataclasses.asdict(speed), "share": speed.share} for speed in speeds],
    }
    (folder / "gpu_check.json").write_text(json.dumps(result, indent=1) + "\n")
    title = f"{machine['device']}: share of the least time"
    (folder / "gpu_check.svg").write_text(svg(title, speeds))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
