"""The public operations: argument checks and the one dispatch rule.

On a GPU the kernels in Triton run (`triton.launch.uses_triton` is the rule). On the CPU the kernels
in C take what they can, torch the rest.

A cache has the logical shape [N, block_size, H_kv, D] with any strides that keep D contiguous;
physically the heads may lie outside (`torch.empty(H_kv, N, block_size, D).permute(1, 2, 0, 3)`).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from cb_kernels import torch_impl
from cb_kernels.cpu.library import kernels
from cb_kernels.ragged import RaggedBatch
from cb_kernels.triton.launch import uses_triton


def attention_path(device_type: str) -> str:
    """The name of the implementation that serves a kind of device."""
    c = kernels() if device_type == "cpu" else None
    return f"paged torch ({device_type})" if c is None else f"paged {c.name} ({device_type})"


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Copy token t's K and V [T, H_kv, D] to slot `slot_mapping[t]`; slot -1 writes nothing.

    Slot s is offset s % block_size of block s // block_size. Slots of a step must be distinct.
    Raises ValueError on shapes or dtypes that do not fit.
    """
    _check_caches(k_cache, v_cache)
    if (
        k.shape != v.shape
        or k.shape[1:] != k_cache.shape[2:]
        or k.dtype != k_cache.dtype
        or v.dtype != v_cache.dtype
    ):
        raise ValueError(f"k {_text(k)} and v {_text(v)} do not fit a cache {_text(k_cache)}")
    if slot_mapping.shape != k.shape[:1]:
        raise ValueError(f"{k.shape[0]} tokens need as many slots, got {_text(slot_mapping)}")
    c = kernels() if k.device.type == "cpu" else None
    if c is not None and c.takes_store(k_cache, v_cache):
        c.store_kv(k, v, k_cache, v_cache, slot_mapping)
    else:
        torch_impl.store_kv(k, v, k_cache, v_cache, slot_mapping)


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: RaggedBatch,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    scales: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Causal attention [T, H_q, D] of a ragged batch over its pages; this step's K and V included.

    `sliding_window`: a query sees that many latest keys, its own among them. `soft_cap`: scores
    become cap * tanh(score / cap). `sinks` [H_q]: a logit per head that only takes weight away.
    `alibi_slopes` [H_q] float32: a score loses slope * distance between query and key, after the
    cap (Press et al. 2022, arXiv 2108.12409). `scales` [H_kv] float32 of K and of V: what a cache
    in float8_e4m3fn is multiplied with. The last two, and a batch that must be deterministic, only
    the kernels in Triton have.
    Raises ValueError on shapes or dtypes that do not fit.
    """
    _check_caches(k_cache, v_cache)
    fits = q.dtype == k_cache.dtype if scales is None else k_cache.dtype == torch.float8_e4m3fn
    if q.dim() != 3 or q.shape[0] != batch.num_tokens or not fits:
        raise ValueError(
            f"q {_text(q)} does not fit {batch.num_tokens} tokens and a cache {_text(k_cache)}"
        )
    if q.shape[2] != k_cache.shape[3] or q.shape[1] % k_cache.shape[2]:
        raise ValueError(f"the heads of q {_text(q)} do not fit a cache {_text(k_cache)}")
    if batch.block_size != k_cache.shape[1]:
        raise ValueError(f"blocks of {batch.block_size} do not fit a cache {_text(k_cache)}")
    if sinks is not None and sinks.shape != q.shape[1:2]:
        raise ValueError(f"{q.shape[1]} heads need as many sinks, got {_text(sinks)}")
    if uses_triton(q):
        from cb_kernels.triton import attention

        k_scale, v_scale = scales or (None, None)
        rule = attention.Rule(
            scale, sliding_window, soft_cap, sinks, alibi_slopes, k_scale, v_scale
        )
        return attention.paged_attention(q, k_cache, v_cache, batch, rule)
    if alibi_slopes is not None or scales is not None or batch.deterministic:
        raise ValueError(
            "ALiBi, a cache in float8 and deterministic batches need the kernels in Triton,"
            f" which do not serve {q.device.type}"
        )
    c = kernels() if q.device.type == "cpu" else None
    attend = torch_impl.paged_attention
    if c is not None and c.takes_attention(q, k_cache, v_cache):
        attend = c.attention
    return attend(
        q,
        k_cache,
        v_cache,
        batch,
        scale=scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        sinks=sinks,
    )


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight [W] over the last dimension, in x's dtype, computed in float32.

    Raises ValueError on a weight of another width.
    """
    _check_norm(x, weight)
    if uses_triton(x):
        from cb_kernels.triton import norm

        return norm.rms_norm(x, weight, eps)
    if weight.dtype != x.dtype:
        return rms_norm(x.float(), weight.float(), eps).to(x.dtype)
    c = kernels() if x.device.type == "cpu" else None
    if c is not None and c.takes_norm(x, weight):
        return c.rms_norm(x, weight, eps)
    return F.rms_norm(x, weight.shape, weight, eps)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """The norm of total = x * scale + residual, and total, which is rounded to x's dtype first.

    Raises ValueError on a residual unlike x or a weight of another width.
    """
    _check_norm(x, weight)
    if residual.shape != x.shape or residual.dtype != x.dtype:
        raise ValueError(f"residual {_text(residual)} does not fit x {_text(x)}")
    if uses_triton(x):
        from cb_kernels.triton import norm

        return norm.add_rms_norm(x, residual, weight, eps, scale)
    total = torch.add(residual, x, alpha=scale)
    return rms_norm(total, weight, eps), total


def rope(x: Tensor, cos: Tensor, sin: Tensor, half: int) -> Tensor:
    """x [T, H, D], which may be overwritten, with dimension i < half turned against i + half.

    cos and sin [T, 1, D]; sin carries the sign of its half, and past 2 * half cos is 1, sin 0.
    """
    c = kernels() if x.device.type == "cpu" else None
    if c is not None and c.takes_rope(x, cos, half):
        return c.rope(x, cos, sin, half)
    return torch_impl.rope(x, cos, sin, half)


class PackedLinear:
    """x W^T + b of a CPU weight in the layout of the kernel in C. See `pack_linear`."""

    def __init__(
        self, packed: Tensor, bias: Tensor | None, shape: torch.Size, *, gated: bool
    ) -> None:
        """`shape`: the weight's, [N, K]."""
        width, self._depth = shape
        self._packed = packed
        self._bias = bias
        self._width = width
        self._gated = gated

    def __call__(self, x: Tensor, onto: Tensor | None = None, scale: float = 1.0) -> Tensor:
        """x [..., K] to [..., N], times `scale` and added onto [..., N] if that is given; gated:
        to silu(gate) * up [..., N / 2]. Raises ValueError on another K or dtype."""
        if x.shape[-1] != self._depth or x.dtype != torch.bfloat16:
            raise ValueError(
                f"x must be bfloat16 [..., {self._depth}], got {x.dtype} {tuple(x.shape)}"
            )
        c = kernels()
        assert c is not None
        rows = x.reshape(-1, x.shape[-1])
        y = c.linear(
            *(rows, self._packed, self._bias, self._width),
            gated=self._gated,
            onto=onto,
            scale=scale,
        )
        return y if x.dim() == 2 else y.view(*x.shape[:-1], y.shape[1])


def pack_linear(weight: Tensor, bias: Tensor | None, *, gated: bool) -> PackedLinear | None:
    """A weight [N, K], copied into the kernel's layout; None where there is no kernel for it.

    `gated`: its rows are those of gate, then those of up, and the product is silu(gate) * up.
    """
    c = kernels() if weight.device.type == "cpu" else None
    if c is None or not c.takes_linear(weight, gated=gated):
        return None
    if gated and bias is not None:
        bias = c.interleave(bias)
    return PackedLinear(c.pack(weight, gated=gated), bias, weight.shape, gated=gated)


def _check_caches(k_cache: Tensor, v_cache: Tensor) -> None:
    if k_cache.dim() != 4 or k_cache.shape != v_cache.shape or k_cache.dtype != v_cache.dtype:
        raise ValueError(
            f"caches must be alike and [N, block_size, H_kv, D], got"
            f" {_text(k_cache)} and {_text(v_cache)}"
        )


def _check_norm(x: Tensor, weight: Tensor) -> None:
    if weight.dim() != 1 or x.shape[-1:] != weight.shape:
        raise ValueError(f"a weight {_text(weight)} does not fit x {_text(x)}")


def _text(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
