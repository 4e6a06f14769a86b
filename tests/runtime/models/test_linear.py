"""Packed products equal plain ones at every row count, and are not used where they do not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from cb_backend.runtime.models.linear import Linear, can_pack

# bfloat16 rounds the result to 8 bits; both sum in float32.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


@pytest.fixture(autouse=True)
def _forget_the_choice() -> None:
    can_pack.cache_clear()


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("shape", [(1, 1), (7, 5), (48, 80), (199, 48)], ids=str)
def test_a_packed_product_is_the_plain_one(
    shape: tuple[int, int], biased: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    weight = torch.randn(shape, dtype=dtype) * shape[1] ** -0.5
    bias = torch.randn(shape[0], dtype=dtype) if biased else None
    linear = Linear(weight.clone(), bias)
    linear.pack()
    for num_rows in (1, 3, 16, 67, 300):
        x = torch.randn(num_rows, shape[1], dtype=dtype)
        tolerance = TOLERANCES[dtype]
        torch.testing.assert_close(
            linear(x), F.linear(x, weight, bias), atol=tolerance, rtol=tolerance
        )
        wide = torch.randn(num_rows, 2 * shape[1], dtype=dtype)[:, : shape[1]]
        torch.testing.assert_close(
            linear(wide), F.linear(wide, weight, bias), atol=tolerance, rtol=tolerance
        )


def test_packing_drops_the_plain_weight() -> None:
    linear = Linear(torch.randn(8, 8))
    linear.pack()
    assert (linear.weight is None) == can_pack("cpu", torch.float32)


@pytest.mark.parametrize(
    ("device_type", "dtype"), [("cuda", torch.bfloat16), ("cpu", torch.float16)], ids=str
)
def test_other_devices_and_dtypes_keep_the_plain_weight(
    device_type: str, dtype: torch.dtype
) -> None:
    assert not can_pack(device_type, dtype)


def test_a_packed_product_that_is_wrong_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(
        torch.ops.mkldnn, "_linear_pointwise", lambda x, w, *_: torch.zeros(5, 48), raising=False
    )
    monkeypatch.setattr(
        torch.ops.mkldnn, "_reorder_linear_weight", lambda w, rows: w, raising=False
    )
    assert not can_pack("cpu", torch.float32)
    assert "is off by" in caplog.text
    caplog.clear()
    linear = Linear(torch.eye(3))
    linear.pack()
    assert torch.equal(linear(torch.ones(2, 3)), torch.ones(2, 3))
    assert caplog.text == ""  # the choice is logged once


def test_a_torch_without_the_private_operators_is_served_plainly(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class NoOperators:
        pass

    monkeypatch.setattr(torch.ops, "mkldnn", NoOperators())
    assert not can_pack("cpu", torch.bfloat16)
    assert "has no packed product" in caplog.text
