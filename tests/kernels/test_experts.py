"""The choice of experts by torch; their products are for GPUs."""

from __future__ import annotations

import pytest
import torch
from cb_kernels import mix_experts, reference, route


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_route_is_that_of_float64(dtype: torch.dtype, normalize: bool) -> None:
    torch.manual_seed(0)
    logits = torch.stack([torch.randperm(60) for _ in range(9)]).to(dtype) / 8  # none equal
    weights, chosen = route(logits, 4, normalize=normalize)
    expected, order = reference.route(logits, 4, normalize=normalize)
    assert torch.equal(chosen, order)
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights.double(), expected, atol=1e-7, rtol=1e-5)


def test_what_no_experts_fit_is_refused() -> None:
    for logits, top_k in ((torch.ones(3, 4), 5), (torch.ones(3, 4), 0), (torch.ones(4), 1)):
        with pytest.raises(ValueError, match="cannot be chosen"):
            route(logits, top_k, normalize=False)


def test_on_a_cpu_the_products_are_refused() -> None:
    weights, chosen = route(torch.randn(3, 4), 2, normalize=True)
    down = torch.ones(4, 48, 24)
    with pytest.raises(ValueError, match="x on cpu"):
        mix_experts(
            *(torch.ones(3, 48), torch.ones(4, 48, 48), down, weights, chosen), activation="silu"
        )
