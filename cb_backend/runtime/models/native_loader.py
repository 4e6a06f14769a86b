"""Builds the native decoder straight from a checkpoint, layer by layer.

Each tensor is copied once, from the mapped file to its place in a fused weight, which is then
packed for the device, or rounded to int8: at no time do two copies of the whole model exist. Engine
thread.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from cb_kernels import Activation, HugePages, Int8Linear, PackedLinear, uses_triton
from torch import Tensor, nn

from cb_backend.config import Quantization
from cb_backend.errors import ModelError
from cb_backend.runtime.models.checkpoint import Checkpoint
from cb_backend.runtime.models.decoder import (
    Decoder,
    DecoderLayer,
    SelfAttention,
)
from cb_backend.runtime.models.embedding import Embedding
from cb_backend.runtime.models.linear import Linear
from cb_backend.runtime.models.mlp import (
    GatedMLP,
    MixtureOfExperts,
    Router,
    SeparateExperts,
    StackedExperts,
)
from cb_backend.runtime.models.norms import QKNorm, RMSNorm
from cb_backend.runtime.models.plain_decoder import plain_decoder
from cb_backend.runtime.models.rope import Rope
from cb_backend.runtime.models.spec import DecoderSpec, ExpertsSpec, LayerSpec, NotCoveredError

if TYPE_CHECKING:
    from cb_backend.runtime.models.model_config import ModelConfig

logger = logging.getLogger(__name__)

# Kept by old checkpoints although they follow from the config.
_DERIVED = ("rotary_emb.inv_freq", ".attention.bias", ".attn.masked_bias")

# Of transformers' names those of the kernels.
_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
}


class NativeLoader:
    """Raises NotCoveredError when the checkpoint holds weights this decoder would ignore, and
    ModelError when it lacks one or a shape disagrees with the config."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: ModelConfig,
        spec: DecoderSpec,
        *,
        dtype: torch.dtype,
        device: torch.device,
        quantization: Quantization = "none",
        deterministic: bool = False,
    ) -> None:
        self._checkpoint = checkpoint
        self._spec = spec
        self._dtype = dtype
        self._device = device
        self._quantization = quantization
        self._deterministic = deterministic
        self._pages = HugePages()
        # silu(gate) * up is part of the product; other activations are the MLP's own.
        self._gated = spec.activation == "silu"
        self._activation = None if self._gated else spec.activation
        kinds = {layer.rope for layer in spec.layers if layer.rope is not None}
        self._ropes = {
            kind: Rope(config, kind, spec.head_dim, dtype, device) for kind in sorted(kinds)
        }

    def load(self) -> Decoder:
        spec = self._spec
        embedding, lm_head = self._embedding_and_head()
        layers = [self._layer(index, layer) for index, layer in enumerate(spec.layers)]
        norm = self._norm("model.norm", spec.hidden_size)
        ignored = [name for name in self._checkpoint.unread if not name.endswith(_DERIVED)]
        if ignored:
            raise NotCoveredError(f"it has no place for {len(ignored)} weights: {min(ignored)}...")
        decoder = Decoder(
            spec,
            embedding=embedding,
            layers=layers,
            norm=norm,
            lm_head=lm_head,
            ropes=self._ropes,
            plain=plain_decoder(spec, embedding, layers, norm, lm_head, self._ropes),
            deterministic=self._deterministic,
        )
        if self._quantization == "int8":
            _log_int8(decoder)
        return decoder.eval()

    def _embedding_and_head(self) -> tuple[Embedding, Linear]:
        spec = self._spec
        weight = self._tensor(["model.embed_tokens.weight"], (spec.vocab_size, spec.hidden_size))
        if not spec.tied_embeddings:
            head = self._linear(["lm_head"], [spec.vocab_size], spec.hidden_size, bias=False)
            return Embedding(weight), head
        self._checkpoint.unread.discard("lm_head.weight")
        head = self._packed(Linear(weight, invariant=self._deterministic))
        shared = head.kernel if isinstance(head.kernel, PackedLinear) else None
        return Embedding(weight if shared is None else shared), head

    def _layer(self, index: int, layer: LayerSpec) -> DecoderLayer:
        spec, prefix = self._spec, f"model.layers.{index}"
        names: dict[str, str] = {}  # place -> what the checkpoint calls the norm there
        if spec.pre_norms:
            names |= {"attention_in": "input_layernorm", "mlp_in": spec.mlp_norm}
        if spec.post_norms:
            names |= {
                "attention_out": "post_attention_layernorm",
                "mlp_out": "post_feedforward_layernorm",
            }
        norms = {
            place: self._norm(f"{prefix}.{name}", spec.hidden_size) for place, name in names.items()
        }
        if layer.experts is None:
            mlp: nn.Module = self._mlp(f"{prefix}.mlp", spec.intermediate_size)
        else:
            mlp = self._experts(f"{prefix}.{layer.experts.block}", layer.experts)
        attention = self._attention(f"{prefix}.self_attn", index, layer)
        return DecoderLayer(spec, attention=attention, mlp=mlp, norms=norms)

    def _attention(self, prefix: str, index: int, layer: LayerSpec) -> SelfAttention:
        spec = self._spec
        q_width, kv_width = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        sources = ["qkv_proj"] if spec.fused_weights else ["q_proj", "k_proj", "v_proj"]
        widths = [q_width, kv_width, kv_width]
        qk_norm = None
        if spec.head_norms or spec.width_norms:
            q_norm = self._norm(f"{prefix}.q_norm", q_width if spec.width_norms else spec.head_dim)
            k_norm = self._norm(f"{prefix}.k_norm", kv_width if spec.width_norms else spec.head_dim)
            qk_norm = QKNorm(q_norm, k_norm, spec.num_heads, spec.head_dim)
        return SelfAttention(
            spec,
            layer,
            index,
            qkv=self._linear(
                [f"{prefix}.{source}" for source in sources],
                [sum(widths)] if spec.fused_weights else widths,
                spec.hidden_size,
                bias=spec.qkv_bias,
            ),
            output=self._linear(
                [f"{prefix}.o_proj"], [spec.hidden_size], q_width, bias=spec.output_bias
            ),
            qk_norm=qk_norm,
            rope=None if layer.rope is None else self._ropes[layer.rope],
        )

    def _mlp(self, prefix: str, width: int) -> GatedMLP:
        spec = self._spec
        names, widths = [f"{prefix}.gate_proj", f"{prefix}.up_proj"], [width, width]
        if spec.fused_weights:
            names, widths = [f"{prefix}.gate_up_proj"], [2 * width]
        bias = spec.mlp_bias and not spec.fused_weights
        gate_up = self._linear(names, widths, spec.hidden_size, bias=bias, gated=self._gated)
        down = self._linear([f"{prefix}.down_proj"], [spec.hidden_size], width, bias=spec.mlp_bias)
        return GatedMLP(gate_up, down, self._activation)

    def _experts(self, prefix: str, experts: ExpertsSpec) -> MixtureOfExperts:
        # A router stays as it is: it is small, and a rounded score may choose another expert.
        shape = (experts.num_experts, self._spec.hidden_size)
        weight = self._tensor([f"{prefix}.gate.weight"], shape)
        scores = Linear(weight, invariant=self._deterministic)
        scores.pack()
        router = Router(scores, top_k=experts.top_k, normalize=experts.normalize)
        prefixes = [f"{prefix}.experts.{index}" for index in range(experts.num_experts)]
        # Int8 is for the kernel in C.
        if uses_triton(weight) and self._quantization == "none":
            return MixtureOfExperts(router, self._stacked_experts(prefixes, experts))
        return MixtureOfExperts(router, self._separate_experts(prefixes, experts))

    def _separate_experts(self, prefixes: list[str], experts: ExpertsSpec) -> SeparateExperts:
        hidden, width = self._spec.hidden_size, experts.intermediate_size
        mlps = []
        for prefix in prefixes:
            names = [f"{prefix}.{experts.gate}", f"{prefix}.{experts.up}"]
            gate_up = self._linear(names, [width] * 2, hidden, bias=False, gated=self._gated)
            down = self._linear([f"{prefix}.{experts.down}"], [hidden], width, bias=False)
            mlps.append(GatedMLP(gate_up, down, self._activation))
        return SeparateExperts(mlps)

    def _stacked_experts(self, prefixes: list[str], experts: ExpertsSpec) -> StackedExperts:
        hidden, width = self._spec.hidden_size, experts.intermediate_size
        both = (experts.gate, experts.up)
        gate_up = [f"{prefix}.{name}.weight" for prefix in prefixes for name in both]
        down = [f"{prefix}.{experts.down}.weight" for prefix in prefixes]
        count = len(prefixes)
        return StackedExperts(
            self._tensor(gate_up, (count * 2 * width, hidden)).view(count, 2 * width, hidden),
            self._tensor(down, (count * hidden, width)).view(count, hidden, width),
            _ACTIVATIONS[self._spec.activation],
            invariant=self._deterministic,
        )

    def _linear(
        self,
        names: Sequence[str],
        widths: Sequence[int],
        in_width: int,
        *,
        bias: bool,
        gated: bool = False,
    ) -> Linear:
        """One packed product of several projections: their outputs lie side by side."""
        weight = self._tensor([f"{name}.weight" for name in names], (sum(widths), in_width))
        bias_tensor = None
        if bias:
            bias_tensor = self._tensor([f"{name}.bias" for name in names], (sum(widths),))
        linear = Linear(weight, bias_tensor, gated=gated, invariant=self._deterministic)
        return self._packed(linear)

    def _packed(self, linear: Linear) -> Linear:
        if self._quantization == "int8":
            linear.quantize(self._pages)
        else:
            linear.pack(self._pages)
        return linear

    def _norm(self, name: str, width: int) -> RMSNorm:
        weight = self._tensor([f"{name}.weight"], (width,))
        if self._spec.norm_adds_one:
            # 1 + weight has no room in bfloat16; these models norm in float32.
            weight = weight.float() + 1.0
        return RMSNorm(weight, self._spec.norm_eps)

    def _tensor(self, names: Sequence[str], shape: tuple[int, ...]) -> Tensor:
        """The named tensors one below the other, in a new tensor of `shape`."""
        target = torch.empty(shape, dtype=self._dtype, device=self._device)
        start = 0
        for name in names:
            part = self._checkpoint.tensor(name)
            stop = start + (part.shape[0] if part.dim() else 0)
            if part.shape[1:] != target.shape[1:] or stop > target.shape[0]:
                raise ModelError(
                    f"{name} is {list(part.shape)}, which does not fit the {list(shape)}"
                    " that the config asks for"
                )
            target[start:stop].copy_(part)
            start = stop
        if start != target.shape[0]:
            raise ModelError(f"{', '.join(names)} fill {start} of {shape[0]} rows")
        return target


def _log_int8(decoder: Decoder) -> None:
    kernels = [module.kernel for module in decoder.modules() if isinstance(module, Linear)]
    rounded = [kernel for kernel in kernels if isinstance(kernel, Int8Linear)]
    by_torch = sum(kernel.packed is None for kernel in rounded)
    if by_torch:
        logger.warning(
            "quantization: int8, and torch multiplies %d of %d weights, slower than without: the"
            " kernel in C needs AVX-512 VNNI, float32 or bfloat16, and outputs in 16s",
            *(by_torch, len(rounded)),
        )
    else:
        logger.info("quantization: int8, %d weights for the kernel in C", len(rounded))
