"""What a request wants of logits before they are sampled from: mask, bias, penalties."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cb_kernels.logits import LogitEdits
from cb_kernels.triton.launch import chip, launch
from cb_kernels.triton.table import options


def edit_logits(logits: Tensor, edits: LogitEdits) -> Tensor:
    """See `logits.edit_logits`."""
    num_rows, vocab = logits.shape
    out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    config = options("edit_logits", "any", chip(logits))
    bias_ids, bias_values = edits.bias or (None, None)
    launch(
        _edit_logits,
        (num_rows, triton.cdiv(vocab, config["BLOCK"])),
        *(logits, out, edits.allowed, bias_ids, bias_values, edits.prompt, edits.counts),
        *(edits.repetition, edits.presence, edits.frequency),
        *(logits.stride(0), vocab, triton.cdiv(vocab, 32)),
        0 if bias_ids is None else bias_ids.shape[1],
        **config,
    )
    return out


@triton.jit(do_not_specialize=["num_biases"])
def _edit_logits(
    logits_ptr,  # [R, vocab]
    out_ptr,  # [R, vocab] float32
    allowed_ptr,  # [R, words] int32, a bit per token, or None
    bias_ids_ptr,  # [R, num_biases], or None
    bias_values_ptr,
    prompt_ptr,  # [R, words], or None
    counts_ptr,  # [R, vocab] int32, or None
    repetition_ptr,  # [R]
    presence_ptr,
    frequency_ptr,
    row_stride,
    vocab,
    words,
    num_biases,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab
    x = tl.load(logits_ptr + row * row_stride + token, mask=inside, other=0.0).to(tl.float32)
    if allowed_ptr is not None:
        word = tl.load(allowed_ptr + row * words + token // 32, mask=inside, other=0)
        x = tl.where(((word >> (token % 32)) & 1) != 0, x, float("-inf"))
    if bias_ids_ptr is not None:
        for i in range(num_biases):
            biased = tl.load(bias_ids_ptr + row * num_biases + i)
            x += tl.where(token == biased, tl.load(bias_values_ptr + row * num_biases + i), 0.0)
    if counts_ptr is not None:
        counts = tl.load(counts_ptr + row * vocab + token, mask=inside, other=0)
        word = tl.load(prompt_ptr + row * words + token // 32, mask=inside, other=0)
        seen = (counts > 0) | (((word >> (token % 32)) & 1) != 0)
        repetition = tl.load(repetition_ptr + row)
        x = tl.where(seen, tl.where(x > 0, x / repetition, x * repetition), x)
        x -= tl.load(frequency_ptr + row) * counts.to(tl.float32)
        x -= tl.where(counts > 0, tl.load(presence_ptr + row), 0.0)
    tl.store(out_ptr + row * vocab + token, x, mask=inside)
