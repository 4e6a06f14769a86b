"""bfloat16 and float8 in Triton's interpreter, rounded as a GPU rounds them.

The interpreter (3.6 to 3.9) keeps these types as raw integers, computes on the raw bits, and
truncates where it should round. Here casts and `tl.dot` decode and encode through torch. Other
arithmetic on them raises: a kernel of ours that does not convert to float32 first has a mistake.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

Handle = interpreter.TensorHandle
Builder = interpreter.InterpreterBuilder

_RAW = {
    tl.bfloat16: (torch.int16, torch.bfloat16),
    tl.float8e4nv: (torch.uint8, torch.float8_e4m3fn),
    tl.float8e5: (torch.uint8, torch.float8_e5m2),
}


def install() -> None:
    """Patch the interpreter for the rest of the process."""
    Builder.cast_impl = _cast(Builder.cast_impl)
    Builder.create_fp_to_fp = _cast(Builder.create_fp_to_fp)
    Builder.binary_op = _binary(Builder.binary_op)
    Builder.unary_op = _refusing(Builder.unary_op)
    Builder.create_fma = _refusing(Builder.create_fma)
    Builder.create_dot = _dot
    interpreter.ReduceOps.sum = _refusing(interpreter.ReduceOps.sum)
    interpreter.ReduceOps.min_max = _refusing(interpreter.ReduceOps.min_max)
    interpreter._patch_lang_tensor = _indexable(interpreter._patch_lang_tensor)


def _is_raw(dtype: Any) -> bool:
    return dtype.scalar in _RAW


def _decoded(handle: Any) -> np.ndarray:
    """The values of a floating handle, as numpy can hold them."""
    if not _is_raw(handle.dtype):
        return handle.data
    raw, real = _RAW[handle.dtype.scalar]
    data = np.ascontiguousarray(handle.data)
    return torch.from_numpy(data.view(str(raw).removeprefix("torch."))).view(real).float().numpy()


def _encoded(values: np.ndarray, dtype: Any) -> Any:
    """Round to nearest even; a float8 saturates instead of becoming infinite."""
    scalar = dtype.scalar
    if scalar not in _RAW:
        return Handle(values.astype(interpreter._get_np_dtype(scalar)), scalar)
    raw, real = _RAW[scalar]
    numbers = torch.from_numpy(np.array(values, dtype=np.float32))
    if raw == torch.uint8:
        numbers = numbers.clamp(-torch.finfo(real).max, torch.finfo(real).max)
    bits = numbers.to(real).view(raw).numpy()
    return Handle(bits.view(interpreter._get_np_dtype(scalar)), scalar)


def _cast(original: Any) -> Any:
    def cast(self: Any, source: Any, dtype: Any, *rest: Any) -> Any:
        if _is_raw(source.dtype) or _is_raw(dtype):
            return _encoded(_decoded(source), dtype)
        return original(self, source, dtype, *rest)

    return cast


def _binary(original: Any) -> Any:
    checked = _refusing(original)

    def binary_op(self: Any, left: Any, right: Any, op: Any) -> Any:
        result = checked(self, left, right, op)
        if result.data.dtype == np.bool_:  # a comparison's result still had its operands' type
            result.dtype = tl.int1
        return result

    return binary_op


def _refusing(original: Any) -> Any:
    def op(self: Any, *operands: Any, **named: Any) -> Any:
        for operand in operands:
            dtype = getattr(operand, "dtype", None)
            if isinstance(dtype, tl.dtype) and _is_raw(dtype):
                raise TypeError(f"arithmetic on {dtype.scalar}: the kernel must convert to float32")
        return original(self, *operands, **named)

    return op


def _dot(self: Any, a: Any, b: Any, total: Any, *_precision: Any) -> Any:
    x, y = _decoded(a), _decoded(b)
    dtype = total.data.dtype
    return Handle(np.matmul(x.astype(dtype), y.astype(dtype)) + total.data, total.dtype.scalar)


def _indexable(original: Any) -> Any:
    """numpy 2.4 no longer makes an int of an array of one element, as Triton 3.6 asks it to."""

    def patch(tensor: Any, *scope: Any) -> Any:
        result = original(tensor, *scope)
        tensor.__index__ = lambda self: int(self.handle.data.item())
        return result

    return patch
