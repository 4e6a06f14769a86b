"""The batch-invariant linear layer: right, the same for one row as among many, and how fast."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from cb_kernels import invariant_linear

from gpu_check.kernels import Correct, Model, Timed
from gpu_check.timing import Run


def correct(model: Model, device: torch.device) -> Iterator[Correct]:
    torch.manual_seed(0)
    # Roundings of float32 sums of so many products, of numbers of about sqrt(hidden).
    for dtype, unit in ((torch.bfloat16, 2**-8), (torch.float16, 2**-11), (torch.float32, 2e-5)):
        x = torch.randn(130, model.hidden, device=device).to(dtype)
        weight = torch.randn(3 * model.head_dim, model.hidden, device=device).to(dtype)
        name = str(dtype).removeprefix("torch.")
        yield Correct(
            *("linear", name),
            partial(invariant_linear, x, weight),
            partial(_product, x, weight),
            unit * 1.05,
            least=1.0,
        )
        yield Correct(
            *("linear", f"{name}, one row"),
            partial(invariant_linear, x[77:78], weight),
            partial(_row_among_many, x, weight),
            tolerance=0.0,
        )


def _product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.cpu().double() @ weight.cpu().double().T


def _row_among_many(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return invariant_linear(x, weight)[77:78].double()


def timed(model: Model, device: torch.device, *, scale: int = 1) -> Iterator[Timed]:
    width, depth = 2 * model.intermediate, model.hidden

    def make(num_rows: int) -> Run:
        x = torch.randn(num_rows, depth, device=device).bfloat16()
        return partial(invariant_linear, x, torch.randn(width, depth, device=device).bfloat16())

    for num_rows in (1, 64, 4096):
        rows = max(1, num_rows // scale)
        yield Timed(
            *("linear, invariant", f"M={rows}", partial(make, rows)),
            num_bytes=2 * (width * depth + rows * (width + depth)),
            num_flops=2 * rows * width * depth,
        )
