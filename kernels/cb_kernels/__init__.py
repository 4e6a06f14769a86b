"""Operations on a paged KV cache. Each has a plain torch reference; knows nothing of cb_backend."""

from cb_kernels.ops import attention_path, paged_attention, store_kv
from cb_kernels.ragged import RaggedBatch, Workspace

__all__ = ["RaggedBatch", "Workspace", "attention_path", "paged_attention", "store_kv"]
