"""The perplexity of a text by a model's own forward pass, with int8 weights and without.

The text is the language reference that comes with Python, so it is the same for all who have the
same Python. Windows of it go through the model in chunks, as prompts do. CPU.
"""

from __future__ import annotations

import dataclasses
import math
import pydoc_data.topics
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from cb_kernels import RaggedBatch
from transformers import AutoTokenizer

from cb_backend.config import EngineConfig
from cb_backend.runtime.attention import StepAttention
from cb_backend.runtime.kv_cache import KVCache
from cb_backend.runtime.models.interface import CausalModel
from cb_backend.runtime.models.loader import load_model

CPU = torch.device("cpu")
BLOCK_SIZE = 32
WINDOWS, WINDOW_TOKENS = 16, 512
CHUNK = 192  # no divisor of a window: the last chunk is a short one


def windows_of(model_folder: str, count: int = WINDOWS) -> list[list[int]]:
    """Token ids of pieces that lie evenly over the text."""
    text = "\n\n".join(pydoc_data.topics.topics.values())
    token_ids: list[int] = AutoTokenizer.from_pretrained(model_folder)(text)["input_ids"]
    starts = range(0, len(token_ids) - WINDOW_TOKENS, len(token_ids) // count)
    return [token_ids[start : start + WINDOW_TOKENS] for start in starts][:count]


@torch.inference_mode()
def perplexity(model: CausalModel, windows: Sequence[Sequence[int]]) -> float:
    """Of every token but each window's first."""
    total = sum(float(_losses(model, torch.tensor(window)).sum()) for window in windows)
    return math.exp(total / sum(len(window) - 1 for window in windows))


def _losses(model: CausalModel, token_ids: torch.Tensor) -> torch.Tensor:
    """Minus the log-probability of each token after the first."""
    num_blocks = -(-len(token_ids) // BLOCK_SIZE)
    cache = KVCache(model.geometry, num_blocks, BLOCK_SIZE, dtype=model.dtype, device=CPU)
    cache.clear(range(num_blocks))
    logits = []
    for positions in torch.arange(len(token_ids)).split(CHUNK):
        batch = RaggedBatch(
            block_table=torch.arange(num_blocks)[None],
            query_start_loc=[0, len(positions)],
            seq_lens=[int(positions[-1]) + 1],
            block_size=BLOCK_SIZE,
        )
        attention = StepAttention(cache, batch, positions)  # block i is the table's i-th
        rows = torch.arange(len(positions))
        logits.append(model.forward(token_ids[positions], positions, attention, rows).float())
    return F.cross_entropy(torch.cat(logits)[:-1], token_ids[1:], reduction="none")


def measured(settings: EngineConfig, windows: Sequence[Sequence[int]]) -> dict[str, float]:
    """Perplexity by quantization."""
    found = {}
    for quantization in ("none", "int8"):
        chosen = dataclasses.replace(settings, quantization=quantization)
        with torch.inference_mode():
            model, _ = load_model(chosen, CPU)
        found[quantization] = perplexity(model, windows)
        print(f"quantization {quantization}, {model.dtype}: {found[quantization]:.4f}", flush=True)
    return found
