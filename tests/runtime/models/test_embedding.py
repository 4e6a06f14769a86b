"""Embeddings out of a packed lm_head are the weight's own rows, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from cb_kernels import PackedLinear, pack_linear

from cb_backend.config import EngineConfig
from cb_backend.runtime.models.decoder import Decoder
from cb_backend.runtime.models.embedding import Embedding
from cb_backend.runtime.models.loader import load_model
from tests.models import TinyModel
from tests.needs import needs_pairs


@needs_pairs
@pytest.mark.parametrize("vocab", [16, 64, 208, 1024])
def test_rows_of_a_packed_weight_are_the_weight_s(vocab: int) -> None:
    torch.manual_seed(0)
    weight = torch.randn(vocab, 34).bfloat16()
    weight[3] = float("nan")  # bits, not numbers
    packed = pack_linear(weight, None, gated=False)
    assert packed is not None
    embedding = Embedding(packed)
    for num_tokens in (0, 1, 5, 300):
        ids = torch.randint(0, vocab, (num_tokens,))
        found, wanted = embedding(ids), F.embedding(ids, weight)
        assert torch.equal(found.view(torch.int16), wanted.view(torch.int16))
    assert embedding.dtype == torch.bfloat16


@needs_pairs
@pytest.mark.parametrize("wrong", [-1, 208, 10**9])
def test_an_id_that_is_not_there_is_refused_and_not_some_other_row(wrong: int) -> None:
    packed = pack_linear(torch.ones(208, 34, dtype=torch.bfloat16), None, gated=False)
    assert packed is not None
    with pytest.raises(IndexError, match=f"{wrong}.* of 208 rows"):
        packed.rows(torch.tensor([0, wrong]))


@needs_pairs
def test_a_tied_model_keeps_one_copy_of_its_embedding(tmp_path: Path) -> None:
    changes = {"tie_word_embeddings": True, "vocab_size": 208}
    tiny = TinyModel("tied", "llama", changes)
    folder = tiny.save(tmp_path, dtype=torch.bfloat16)
    model, _ = load_model(EngineConfig(model=str(folder), dtype="bfloat16"), torch.device("cpu"))
    assert isinstance(model, Decoder)
    assert isinstance(model.embedding.weight, PackedLinear)
    assert model.embedding.weight is model.lm_head.kernel
    weight = tiny.build().to(torch.bfloat16).get_input_embeddings().weight
    assert torch.equal(model.embedding(torch.arange(208)), weight)
