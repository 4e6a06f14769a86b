"""Operations on a paged KV cache and around it. Each has a plain torch reference; knows nothing of
cb_backend."""

from cb_kernels.cpu.layer_stack import LayerStack, LayerWeights, PagedStep, StackShape
from cb_kernels.ops import (
    attention_path,
    paged_attention,
    rms_norm,
    rope,
    store_kv,
)
from cb_kernels.packed_linear import PackedLinear, pack_linear
from cb_kernels.paired import can_pair, paired_views, plain_views
from cb_kernels.ragged import RaggedBatch, Workspace

__all__ = [
    "LayerStack",
    "LayerWeights",
    "PackedLinear",
    "PagedStep",
    "RaggedBatch",
    "StackShape",
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
