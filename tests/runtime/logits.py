"""Logits of a loaded model over packed sequences, without a runner around it; and whose differ."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from cb_kernels import RaggedBatch
from torch import Tensor

from cb_backend.runtime.attention import StepAttention
from cb_backend.runtime.kv_cache import KVCache
from cb_backend.runtime.models.interface import CausalModel
from gpu_check.serving import Logits


def packed_step(
    model: CausalModel, prompts: Sequence[Sequence[int]], block_size: int
) -> tuple[Tensor, Tensor, StepAttention]:
    """Token ids, positions and attention of one ragged pass over all prompts."""
    counts = [len(prompt) for prompt in prompts]
    width = -(-max(counts) // block_size)
    cpu = torch.device("cpu")
    cache = KVCache(model.geometry, width * len(counts), block_size, dtype=model.dtype, device=cpu)
    cache.clear(range(width * len(counts)))
    positions = torch.cat([torch.arange(count) for count in counts])
    starts = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    batch = RaggedBatch(
        block_table=torch.arange(width * len(counts)).view(len(counts), width),
        query_start_loc=[sum(counts[:i]) for i in range(len(counts) + 1)],
        seq_lens=counts,
        block_size=block_size,
    )
    attention = StepAttention(cache, batch, starts * width * block_size + positions)
    tokens = torch.tensor([token for prompt in prompts for token in prompt])
    return tokens, positions, attention


@torch.inference_mode()
def packed_logits(
    model: CausalModel,
    prompts: Sequence[Sequence[int]],
    block_size: int = 4,
    wanted: Tensor | None = None,
) -> list[Tensor]:
    """Logits [tokens, V] of each prompt, all computed in one ragged pass; or in one tensor, of the
    `wanted` of all their tokens."""
    step = packed_step(model, prompts, block_size)
    if wanted is not None:
        return [model.forward(*step, wanted)]
    logits = model.forward(*step, torch.arange(len(step[0])))
    return list(logits.split([len(prompt) for prompt in prompts]))


def differing(logits: Logits, expected: Logits) -> list[tuple[str, int]]:
    """Whose logits are not those expected, to the bit."""
    return [
        key
        for key, row in logits.items()
        if key not in expected or not torch.equal(row, expected[key])
    ]
