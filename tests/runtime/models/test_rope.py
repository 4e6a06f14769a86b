"""The rotation of a position is one and the same, in whichever step and order it is asked for."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from cb_backend.runtime.models.rope import Rope

CPU = torch.device("cpu")


class Config:
    rope_parameters: dict[str, Any] = {  # noqa: RUF012
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "partial_rotary_factor": 0.5,
    }


def rope(dtype: torch.dtype = torch.bfloat16) -> Rope:
    return Rope(cast("Any", Config()), None, 32, dtype, CPU)


@pytest.mark.parametrize("first", [0, 1, 7, 1023, 1024, 5000])
def test_a_position_keeps_its_bits_as_the_table_grows(first: int) -> None:
    grown, whole = rope(torch.float32), rope(torch.float32)
    before = [turns.clone() for turns in grown.turns(torch.tensor([first]))]
    grown.turns_up_to(20_000)
    for early, late in zip(before, grown.turns(torch.tensor([first])), strict=True):
        assert torch.equal(early, late)
    for one, other in zip(grown.turns_up_to(20_000), whole.turns_up_to(20_000), strict=True):
        assert torch.equal(one[:20_000], other[:20_000])


def test_turns_are_rows_of_the_table() -> None:
    turned = rope()
    positions = torch.tensor([3, 0, 2047, 3, 1024])
    cos, sin = turned.turns(positions)
    all_cos, all_sin = turned.turns_up_to(1)
    assert cos.shape == sin.shape == (5, 1, 32)
    assert torch.equal(cos[:, 0], all_cos[positions])
    assert torch.equal(sin[:, 0], all_sin[positions])


def test_the_table_says_cos_and_sin_and_leaves_the_rest() -> None:
    cos, sin = rope(torch.float32).turns_up_to(3000)
    frequencies = 10_000.0 ** (-torch.arange(0, 16, 2, dtype=torch.float64) / 16)
    angles = torch.arange(len(cos))[:, None] * frequencies
    expected_cos = torch.cat((angles.cos(), angles.cos(), torch.ones(len(cos), 16)), -1)
    expected_sin = torch.cat((-angles.sin(), angles.sin(), torch.zeros(len(cos), 16)), -1)
    torch.testing.assert_close(cos.double(), expected_cos, atol=1e-3, rtol=0)
    torch.testing.assert_close(sin.double(), expected_sin, atol=1e-3, rtol=0)
