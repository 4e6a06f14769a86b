"""Operations on a paged KV cache and around it. Each has a plain torch reference; knows nothing of
cb_backend."""

from cb_kernels.ops import (
    PackedLinear,
    add_rms_norm,
    attention_path,
    pack_linear,
    paged_attention,
    rms_norm,
    rope,
    store_kv,
)
from cb_kernels.ragged import RaggedBatch, Workspace

__all__ = [
    "PackedLinear",
    "RaggedBatch",
    "Workspace",
    "add_rms_norm",
    "attention_path",
    "pack_linear",
    "paged_attention",
    "rms_norm",
    "rope",
    "store_kv",
]
