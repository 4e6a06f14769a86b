"""Whole models of random weights: the same logits as transformers', and the time of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from cb_kernels import RaggedBatch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PretrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from cb_backend.runtime.attention import StepAttention
from cb_backend.runtime.kv_cache import KVCache
from cb_backend.runtime.models.decoder import Decoder
from cb_backend.runtime.models.native_loader import NativeLoader
from cb_backend.runtime.models.spec import decoder_spec
from gpu_check.kernels import BLOCK_SIZE, Correct, Model, Timed

TINY: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 500,
}
# Llama 3.2 1B and Qwen3 1.7B, with fewer layers: each layer is like the next.
LLAMA: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 4,
    "head_dim": 64,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
}
_QWEN: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 4,
    "head_dim": 128,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
}


def mixture(*, tiny: bool) -> Qwen3MoeConfig:
    """Few and small experts: what it costs is not asked here."""
    sizes = TINY | {"num_hidden_layers": 1, "vocab_size": 64} if tiny else _QWEN
    num_experts, top_k, inner = (5, 2, 48) if tiny else (16, 4, 256)
    return Qwen3MoeConfig(
        num_experts=num_experts,
        num_experts_per_tok=top_k,
        moe_intermediate_size=inner,
        norm_topk_prob=True,
        **sizes,
    )


class _Weights:
    """Stands in for a checkpoint: tensors made when they are asked for."""

    def __init__(self, makers: Mapping[str, Callable[[], Tensor]]) -> None:
        self._makers = makers
        self.unread = set(makers)

    def __contains__(self, name: str) -> bool:
        return name in self._makers

    def tensor(self, name: str) -> Tensor:
        self.unread.discard(name)
        return self._makers[name]()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._makers[name]().shape)


def _decoder(
    weights: _Weights,
    config: PretrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    deterministic: bool = False,
) -> Decoder:
    checkpoint: Any = weights
    return NativeLoader(
        *(checkpoint, config, decoder_spec(config)),
        dtype=dtype,
        device=device,
        deterministic=deterministic,
    ).load()


def correct(device: torch.device, *, tiny: bool) -> Iterator[Correct]:
    """Prompts of different lengths in one ragged step, float32."""
    configs: tuple[PretrainedConfig, ...] = (
        LlamaConfig(**(TINY if tiny else LLAMA)),
        Qwen3Config(**(TINY if tiny else _QWEN)),
        mixture(tiny=tiny),
    )
    for config in configs:
        torch.manual_seed(0)
        theirs: Any = _transformers(config).to(device).eval()
        # A name bound in a loop: the default keeps this turn's tensor.
        stored = _as_stored(theirs.state_dict())
        makers = {name: partial(lambda t: t, t) for name, t in stored.items()}
        ours = _decoder(_Weights(makers), config, torch.float32, device)
        lens = (1, 9) if tiny else (1, 37, 130)
        prompts = [torch.randint(config.vocab_size, (n,), device=device) for n in lens]
        yield Correct(
            *(f"{config.model_type} model", "float32"),
            partial(_our_logits, ours, prompts, device),
            partial(_their_logits, theirs, prompts),
            tolerance=2e-4,
            least=1.0,
        )


@torch.inference_mode()
def _their_logits(model: Any, prompts: list[Tensor]) -> Tensor:
    logits = [model(prompt[None]).logits[0] for prompt in prompts]
    return torch.cat(logits).double()


@torch.inference_mode()
def _our_logits(model: Decoder, prompts: list[Tensor], device: torch.device) -> Tensor:
    rows = [(len(prompt), len(prompt)) for prompt in prompts]
    logits: Tensor = _step(model, rows, torch.cat(prompts), device, of_all=True)()
    return logits


def _step(
    model: Decoder,
    rows: list[tuple[int, int]],
    token_ids: Tensor,
    device: torch.device,
    *,
    of_all: bool = False,
) -> Callable[[], Tensor]:
    """A step of rows of (queries, keys); logits of each row's last token, or of all."""
    width = -(-max(keys for _, keys in rows) // BLOCK_SIZE)
    cache = KVCache(model.geometry, width * len(rows), BLOCK_SIZE, dtype=model.dtype, device=device)
    cache.pool.zero_()
    table = torch.randperm(width * len(rows)).view(len(rows), width)
    starts = [sum(queries for queries, _ in rows[:i]) for i in range(len(rows) + 1)]
    positions = torch.cat([torch.arange(keys - queries, keys) for queries, keys in rows])
    owners = torch.repeat_interleave(torch.tensor([queries for queries, _ in rows]))
    blocks = table[owners, positions // BLOCK_SIZE]
    slots = (blocks * BLOCK_SIZE + positions % BLOCK_SIZE).to(device)
    lens = [keys for _, keys in rows]
    batch = RaggedBatch(table.int(), starts, lens, BLOCK_SIZE, device=device)
    ends = torch.arange(starts[-1]) if of_all else torch.tensor(starts[1:]) - 1
    attention = StepAttention(cache, batch, slots)

    @torch.inference_mode()
    def run() -> Tensor:
        return model.forward(token_ids, on_device, attention, logit_rows)

    on_device, logit_rows = positions.to(device), ends.to(device)
    return run


def timed(model: Model, device: torch.device, *, scale: int = 1) -> Iterator[Timed]:
    """Steps of a Llama of the sizes in `model`, bfloat16. The floor is its weights and its KV."""
    config = config_of(model)
    decoder = random_decoder(config, torch.bfloat16, device)
    shapes = _shapes(config)
    # Of the embedding only the tokens' rows are read.
    weights = sum(t.numel() for name, t in shapes.items() if "embed" not in name)
    token_bytes = 4 * model.num_layers * model.num_kv_heads * model.head_dim

    def case(name: str, count: int, queries: int, keys: int) -> Timed:
        token_ids = torch.randint(model.vocab, (count * queries,), device=device)
        rows = [(queries, keys)] * count
        attended = count * queries * (keys if queries == 1 else keys // 2)
        return Timed(
            *(name, f"{count} x {keys}"),
            lambda: _step(decoder, rows, token_ids, device),
            num_bytes=2 * weights + token_bytes * count * keys,
            num_flops=2 * weights * len(token_ids)
            + 4 * attended * model.num_layers * model.num_heads * model.head_dim,
        )

    for count in (1, 16, 64, 256):
        yield case("decode step", max(1, count // scale), 1, max(2, 1024 // scale))
    yield case("prefill step", 1, max(2, 8192 // scale), max(2, 8192 // scale))


def config_of(model: Model) -> LlamaConfig:
    """A Llama of these sizes."""
    return LlamaConfig(
        hidden_size=model.hidden,
        intermediate_size=model.intermediate,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_heads,
        num_key_value_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        vocab_size=model.vocab,
    )


def random_decoder(
    config: PretrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    deterministic: bool = False,
) -> Decoder:
    """The same weights each time."""
    torch.manual_seed(0)
    makers = {name: partial(_random, t.shape, dtype, device) for name, t in _shapes(config).items()}
    return _decoder(_Weights(makers), config, dtype, device, deterministic=deterministic)


def _transformers(config: PretrainedConfig) -> Any:
    return AutoModelForCausalLM.from_config(config)


def _shapes(config: PretrainedConfig) -> Mapping[str, Tensor]:
    with torch.device("meta"):
        shapes: Mapping[str, Tensor] = _transformers(config).state_dict()
    return _as_stored(shapes)


def _as_stored(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Named as in a checkpoint: transformers keeps all of a layer's experts in two tensors."""
    stored: dict[str, Tensor] = {}
    for name, tensor in state.items():
        prefix, _, kind = name.rpartition(".")
        if kind not in ("gate_up_proj", "down_proj"):  # else without ".weight"
            stored[name] = tensor
            continue
        for index, weight in enumerate(tensor):
            parts = {"down": weight}
            if kind == "gate_up_proj":
                parts = dict(zip(("gate", "up"), weight.chunk(2), strict=True))
            for part, own in parts.items():
                stored[f"{prefix}.{index}.{part}_proj.weight"] = own
    return stored


def _random(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    if len(shape) == 1:
        return torch.ones(shape, dtype=dtype, device=device)
    return torch.randn(shape, dtype=dtype, device=device) * 0.02
