"""Logits to tokens: the public operations. For GPUs; on the CPU the caller has its own way."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from cb_kernels.shapes import shape_text
from cb_kernels.triton.launch import uses_triton


@dataclass(frozen=True, slots=True)
class LogitEdits:
    """What happens to logits [R, V] before they are sampled from, in this order.

    A mask of tokens is int32 [R, ceil(V / 32)], bit i % 32 of word i // 32 for token i. `counts`
    and all below it come together.
    """

    allowed: Tensor | None = None  # mask; the others' logits become minus infinity
    # Token ids int32 [R, B], distinct in a row or -1, and what to add to their logits, float32.
    bias: tuple[Tensor, Tensor] | None = None
    counts: Tensor | None = None  # int32 [R, V], of each token among those generated
    prompt: Tensor | None = None  # mask of the tokens in the prompt
    # float32 [R]. A seen token's positive logit is divided by it, a negative one multiplied.
    repetition: Tensor | None = None
    presence: Tensor | None = None  # taken from the logit of what was generated
    frequency: Tensor | None = None  # and that for each time it was


@dataclass(frozen=True, slots=True)
class SamplingParameters:
    """One value a row, [R]; the filters work in the order in which they stand."""

    temperature: Tensor  # float32; 0: the first of the largest logits
    top_k: Tensor  # int64; 0: no limit. Of equal logits the first stay
    top_p: Tensor  # float32; of what top_k left
    min_p: Tensor  # float32; of the likeliest token's probability
    seeds: Tensor  # int64
    positions: Tensor  # int64


def edit_logits(logits: Tensor, edits: LogitEdits) -> Tensor:
    """New logits, float32 [R, V]. Raises ValueError on edits for another shape."""
    num_rows, vocab = logits.shape
    words = -(-vocab // 32)
    for tensor, shape in (
        (edits.allowed, (num_rows, words)),
        (edits.counts, (num_rows, vocab)),
        (edits.prompt, (num_rows, words)),
        (edits.repetition, (num_rows,)),
        (edits.presence, (num_rows,)),
        (edits.frequency, (num_rows,)),
    ):
        if tensor is not None and (tensor.shape != shape or not tensor.is_contiguous()):
            raise ValueError(f"an edit {shape_text(tensor)} does not fit {shape_text(logits)}")
    _require_triton(logits)
    from cb_kernels.triton import edit_logits as kernels

    return kernels.edit_logits(logits, edits)


def sample(logits: Tensor, parameters: SamplingParameters) -> tuple[Tensor, Tensor]:
    """Token ids int64 [R] of logits [R, V], and which rows are sound [R].

    A row with a NaN, plus infinity, or nothing but minus infinities is not, and its id means
    nothing. A token depends on its row's logits and parameters alone. Raises ValueError on
    parameters for another number of rows.
    """
    for name in SamplingParameters.__slots__:
        values: Tensor = getattr(parameters, name)
        if values.shape != logits.shape[:1]:
            raise ValueError(f"{name} {shape_text(values)} does not fit {shape_text(logits)}")
    _require_triton(logits)
    from cb_kernels.triton import sample as kernels

    return kernels.sample(logits, parameters)


def _require_triton(logits: Tensor) -> None:
    if not uses_triton(logits):
        raise ValueError(f"logits on {logits.device} are not for these kernels")
