"""The parts of a softmax that `attention_kernel` left, folded to the attention of each query."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from cb_kernels.triton.attention_tiles import LOG2E, NEVER, finite, fold
from cb_kernels.triton.launch import chip, launch
from cb_kernels.triton.table import options


def combine(
    parts: Tensor, stats: Tensor, out: Tensor, sinks: Tensor | None, *, in_order: bool
) -> None:
    """Write out [T, H_q, D] from parts [T, H_q, P, D] and stats [T, H_q, P, 2].

    `in_order`: fold one part after the other, as a program that has them all does, so that both
    get the same bits.
    """
    num_tokens, num_heads, num_parts, head_dim = parts.shape
    config = options("combine", "in order" if in_order else "by tiles", chip(out))
    launch(
        _combine,
        (triton.cdiv(num_tokens * num_heads, config["ROWS"]),),
        *(parts, stats, out, sinks, num_tokens * num_heads, num_parts),
        *(out.stride(0), out.stride(1)),
        NUM_HEADS=num_heads,
        D=head_dim,
        D_PAD=triton.next_power_of_2(head_dim),
        **config,
    )


@triton.jit(do_not_specialize=["num_rows", "num_parts"])
def _combine(
    part_ptr,  # [num_rows, num_parts, D]
    stat_ptr,  # [num_rows, num_parts, 2]
    out_ptr,  # [T, NUM_HEADS, D], any strides but the last
    sinks_ptr,  # [NUM_HEADS], or None
    num_rows,  # T * NUM_HEADS
    num_parts,
    out_token_stride,
    out_head_stride,
    NUM_HEADS: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,  # folded at a time
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    head = row % NUM_HEADS
    dim = tl.arange(0, D_PAD)
    top = tl.full([ROWS], NEVER, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if sinks_ptr is not None:
        top = tl.load(sinks_ptr + head).to(tl.float32) * LOG2E
        total += 1.0
    sums = (tl.zeros([ROWS, D_PAD], tl.float32), top, total)
    for first in range(0, num_parts, PARTS):
        number = first + tl.arange(0, PARTS)
        part = row[:, None] * num_parts + number[None, :]  # [ROWS, PARTS]
        exists = (row[:, None] < num_rows) & (number[None, :] < num_parts)
        tops = tl.load(stat_ptr + part * 2, mask=exists, other=NEVER)
        has_keys = tops > NEVER  # else nobody has written its values
        totals = tl.load(stat_ptr + part * 2 + 1, mask=has_keys, other=0.0)
        pointers = part_ptr + part[:, :, None] * D + dim[None, None, :]
        accs = tl.load(pointers, mask=has_keys[:, :, None] & (dim[None, None, :] < D), other=0.0)
        part_top = tl.max(tops, 1)
        weights = tl.exp2(tops - finite(part_top)[:, None])
        part_acc = tl.sum(accs * weights[:, :, None], 1)
        sums = fold(sums, (part_acc, part_top, tl.sum(totals * weights, 1)))
    acc, top, total = sums
    out = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
    offset = row // NUM_HEADS * out_token_stride + head * out_head_stride
    inside = (row[:, None] < num_rows) & (dim[None, :] < D)
    tl.store(out_ptr + offset[:, None] + dim[None, :], out, mask=inside)
