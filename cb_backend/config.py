"""EngineConfig: every choice a user has about the engine. Frozen, checked once, no IO."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from cb_backend.errors import ConfigError

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Implementation = Literal["auto", "native", "transformers"]
Quantization = Literal["none", "int8"]
KVCacheDtype = Literal["auto", "fp8"]
POLICY_NAMES = ("deadline", "fair", "fcfs", "priority")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Raises ConfigError naming the field, its value and what it may be."""

    model: str  # a local folder in the Hugging Face layout (serving resolves tags and hub ids)
    served_model_name: str = ""  # the id clients use; empty: the folder's name
    device: str = "auto"  # auto: cuda where there is one, else cpu; or cpu, cuda, cuda:1
    dtype: Dtype = "auto"  # auto: what the weights are stored in
    implementation: Implementation = "auto"  # auto: native where it covers the model
    quantization: Quantization = "none"  # int8: of the native decoder's weights, on the CPU
    cuda_graphs: bool = True  # on a GPU, decoding steps are captured at start and replayed
    deterministic: bool = False  # a token's logits are the same to the bit alone or in any batch,
    # computed in any chunks or found in the prefix cache; slower

    max_model_len: int | None = None  # tokens of prompt and output; None: the model's context
    block_size: int | None = None  # tokens per KV block; None: what suits the device
    num_kv_blocks: int | None = None  # None: as many as kv_cache_gib or memory_fraction hold
    kv_cache_gib: float | None = None  # GiB of K and V; None: from memory_fraction
    kv_cache_dtype: KVCacheDtype = "auto"  # auto: the model's; fp8: half of it, on a GPU
    memory_fraction: float = 0.9  # CUDA: share of the device's memory for weights and KV together
    min_free_gib: float | None = None  # GiB to keep free on the device for its other users: the KV
    # pool shrinks and grows with them; None: the pool keeps its size
    max_num_seqs: int = 64  # requests that share a step
    max_num_batched_tokens: int = 512  # token budget of one step
    max_prefill_chunk: int | None = None  # most tokens one request takes of a contended step;
    # None: half of the budget
    target_itl_s: float | None = None  # seconds between a stream's tokens that steps shall keep;
    # the token budget then follows the measured steps; None: always the whole budget
    max_num_waiting: int = 4096  # requests that may queue; beyond it new ones are refused
    max_waiting_tokens: int | None = None  # prompt tokens that may queue; None: no limit
    enable_prefix_caching: bool = True
    cache_file: str | None = None  # where the prefix cache is kept between two runs; None: nowhere
    num_host_kv_blocks: int = 0  # blocks in host memory that evicted ones go to; 0: none

    policy: str = "fcfs"  # order of requests: deadline, fair (per tenant), fcfs, priority, or one
    # of your own as "module:Class", a core.policies.Policy that takes no arguments
    priority_ageing_s: float = 10.0  # seconds of waiting that are worth one level of priority
    tenant_weights: Mapping[str, float] | None = None  # shares under fair; who is not named has 1

    num_threads: int | None = None  # CPU threads of a step; None: what there are
    step_timeout_s: float = 120.0  # a step that runs longer is a hang: the engine is dead
    drain_timeout_s: float = 30.0  # what running requests get to finish in at shutdown
    record: str | None = None  # file for arrivals and decisions, to replay and to plan with
    check_invariants: bool = False  # after every step instead of when idle
    # Opens the gateway's admin routes to whoever has it; None: they are closed. Never shown.
    admin_key: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        for name in ("model", "admin_key"):
            _check_not_empty(name, getattr(self, name))
        for name, choices in _CHOICES.items():
            _check_choice(name, getattr(self, name), choices)
        for name, low in _INTEGERS.items():
            if (count := getattr(self, name)) is not None:
                _check_at_least(name, count, low)
        for name in _POSITIVE:
            if (value := getattr(self, name)) is not None:
                _check_positive(name, value, field=name)
        for tenant, weight in (self.tenant_weights or {}).items():
            _check_positive(f"tenant_weights[{tenant}]", weight, field="tenant_weights")
        _check_policy(self.policy)
        _check_quantization(self.quantization, self.implementation)
        if self.memory_fraction > 1.0:
            raise ConfigError(
                f"memory_fraction must be above 0 and at most 1, got {self.memory_fraction}",
                field="memory_fraction",
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least"
                f" max_num_seqs ({self.max_num_seqs}): each running request needs a token a step",
                field="max_num_batched_tokens",
            )


_CHOICES = {
    "dtype": get_args(Dtype),
    "implementation": get_args(Implementation),
    "quantization": get_args(Quantization),
    "kv_cache_dtype": get_args(KVCacheDtype),
}
_INTEGERS = {  # and their least values
    "max_model_len": 1,
    "block_size": 1,
    "num_kv_blocks": 1,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
    "max_prefill_chunk": 1,
    "max_num_waiting": 1,
    "max_waiting_tokens": 1,
    "num_host_kv_blocks": 0,
    "num_threads": 1,
}
_POSITIVE = (
    "kv_cache_gib",
    "memory_fraction",
    "min_free_gib",
    "target_itl_s",
    "priority_ageing_s",
    "step_timeout_s",
    "drain_timeout_s",
)


def _check_not_empty(name: str, value: str | None) -> None:
    if value == "":
        raise ConfigError(f"{name} must not be an empty string", field=name)


def _check_policy(name: str) -> None:
    if ":" not in name:  # one of the user's own is checked when it is made
        _check_choice("policy", name, (*POLICY_NAMES, "module:Class"))


def _check_quantization(quantization: Quantization, implementation: Implementation) -> None:
    if quantization != "none" and implementation == "transformers":
        raise ConfigError(
            f"quantization {quantization!r} needs the native decoder, and implementation is"
            " 'transformers'; set quantization to none, or implementation to auto or native",
            field="quantization",
        )


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(choices)}, got {value!r}", field=name)


def _check_at_least(name: str, value: int, low: int) -> None:
    if type(value) is not int or value < low:
        raise ConfigError(f"{name} must be an integer of at least {low}, got {value!r}", field=name)


def _check_positive(name: str, value: float, *, field: str) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(f"{name} must be a number above 0, got {value!r}", field=field)
