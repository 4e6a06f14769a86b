"""Operations on a paged KV cache and around it. Each has a plain torch reference; knows nothing of
cb_backend."""

from cb_kernels.ops import (
    PackedLinear,
    attention_path,
    pack_linear,
    paged_attention,
    rms_norm,
    rope,
    store_kv,
)
from cb_kernels.paired import can_pair, paired_views, plain_views
from cb_kernels.ragged import RaggedBatch, Workspace

__all__ = [
    "PackedLinear",
    "RaggedBatch",
    "Workspace",
    "attention_path",
    "can_pair",
    "pack_linear",
    "paged_attention",
    "paired_views",
    "plain_views",
    "rms_norm",
    "rope",
    "store_kv",
]
