"""Operations on a paged KV cache and around it. Each has a plain torch reference; knows nothing of
cb_backend."""

from cb_kernels.argmax import argmax
from cb_kernels.blocks import copy_blocks, gather_blocks, scatter_blocks
from cb_kernels.cpu.plain_decoder import (
    DecoderRun,
    PagedStep,
    PairedCaches,
    PlainDecoder,
    TurnTables,
)
from cb_kernels.cpu.plain_decoder_facts import DecoderEnds, DecoderShape, LayerWeights
from cb_kernels.experts import Activation, mix_experts, route
from cb_kernels.huge_pages import HugePages
from cb_kernels.int8_linear import Int8Linear
from cb_kernels.linear import invariant_linear
from cb_kernels.logits import LogitEdits, SamplingParameters, edit_logits, sample
from cb_kernels.ops import (
    attention_path,
    paged_attention,
    rope,
    store_heads,
    store_kv,
)
from cb_kernels.packed_linear import PackedLinear, multiplies_bfloat16, pack_linear
from cb_kernels.paired import can_pair, paired_views, plain_views
from cb_kernels.pointwise import add_rms_norm, gelu_and_mul, rms_norm, silu_and_mul
from cb_kernels.ragged import RaggedBatch, Rows, Workspace
from cb_kernels.triton.launch import uses_triton

__all__ = [
    "Activation",
    "DecoderEnds",
    "DecoderRun",
    "DecoderShape",
    "HugePages",
    "Int8Linear",
    "LayerWeights",
    "LogitEdits",
    "PackedLinear",
    "PagedStep",
    "PairedCaches",
    "PlainDecoder",
    "RaggedBatch",
    "Rows",
    "SamplingParameters",
    "TurnTables",
    "Workspace",
    "add_rms_norm",
    "argmax",
    "attention_path",
    "can_pair",
    "copy_blocks",
    "edit_logits",
    "gather_blocks",
    "gelu_and_mul",
    "invariant_linear",
    "mix_experts",
    "multiplies_bfloat16",
    "pack_linear",
    "paged_attention",
    "paired_views",
    "plain_views",
    "rms_norm",
    "rope",
    "route",
    "sample",
    "scatter_blocks",
    "silu_and_mul",
    "store_heads",
    "store_kv",
    "uses_triton",
]
