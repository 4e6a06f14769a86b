"""The best ids that the one call finds are those of the logits that it does not write."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cb_kernels import argmax
from torch import Tensor

from cb_backend.runtime.attention import StepAttention
from cb_backend.runtime.models.decoder import Decoder
from tests.models import TinyModel
from tests.needs import needs_pairs
from tests.runtime.logits import packed_step
from tests.runtime.models.test_plain_decoder import PLAIN, PROMPTS, load

pytestmark = needs_pairs


def best(model: Decoder, step: tuple[Tensor, Tensor, StepAttention], wanted: Tensor) -> Tensor:
    token_ids, _, attention = step
    return model.prepare(token_ids, attention, wanted, only_best=True).result()


@torch.inference_mode()
@pytest.mark.parametrize("tiny", PLAIN, ids=str)
def test_the_best_ids_are_those_of_the_logits(tiny: TinyModel, tmp_path: Path) -> None:
    """Of few rows, of many and of none, on fewer threads and on more than there are panels."""
    model = load(tiny, tmp_path)
    assert model.can_prepare == (tiny.name not in ("torch-s-head", "granite-scales"))
    if not model.can_prepare:
        return
    step = packed_step(model, PROMPTS, block_size=16)
    every = torch.arange(len(step[0]))
    logits = model.forward(*step, every)
    before = torch.get_num_threads()
    try:
        for num_threads in (1, 2, 5):
            torch.set_num_threads(num_threads)
            for wanted in (every, every[:1], every[3:8], every[:0]):
                assert torch.equal(best(model, step, wanted), argmax(logits[wanted])[0])
    finally:
        torch.set_num_threads(before)


@torch.inference_mode()
def test_among_equal_logits_the_first_is_best_and_none_that_is_not_finite(tmp_path: Path) -> None:
    model = load(PLAIN[1], tmp_path)
    step = packed_step(model, PROMPTS, block_size=16)
    for norm, expected in ((0.0, 0), (float("nan"), -1), (float("inf"), -1)):
        model.norm.weight.fill_(norm)
        for wanted in (torch.arange(60), torch.arange(2)):
            assert best(model, step, wanted).tolist() == [expected] * len(wanted)
