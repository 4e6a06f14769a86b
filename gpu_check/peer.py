"""An 8B shape served by us and by transformers' own continuous batching, one after the other."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from gpu_check.kernels import Model
from gpu_check.models import config_of, random_decoder
from gpu_check.serving import make_runner, serve

Prompts = dict[str, list[int]]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Output tokens a second of the same requests, random weights of one shape, bfloat16."""

    num_requests: int
    prompt_tokens: int
    output_tokens: int
    ours: float
    theirs: float
    host_microseconds: float  # of ours for a decoding step, without the wait for its tokens

    def __str__(self) -> str:
        return (
            f"serving {self.num_requests} x ({self.prompt_tokens} + {self.output_tokens}) tokens:"
            f" {self.ours:.0f} output tok/s, transformers' continuous batching"
            f" {self.theirs:.0f}, ratio {self.ours / self.theirs:.2f};"
            f" host {self.host_microseconds:.0f} us a step"
        )


def compare(
    model: Model, device: torch.device, *, num_requests: int, num_prompt: int, num_output: int
) -> Comparison:
    """The second of two rounds each."""
    config = config_of(model)
    torch.manual_seed(0)
    ids = torch.randint(3, config.vocab_size, (num_requests, num_prompt)).tolist()
    prompts = {str(i): row for i, row in enumerate(ids)}
    ours, host = _ours(config, prompts, num_output, device)
    _release(device)
    theirs = _theirs(config, prompts, num_output, device)
    _release(device)
    sizes = (num_requests, num_prompt, num_output)
    total = num_requests * num_output
    return Comparison(*sizes, total / ours, total / theirs, host)


def _ours(
    config: LlamaConfig, prompts: Prompts, num_output: int, device: torch.device
) -> tuple[float, float]:
    longest = max(map(len, prompts.values())) + num_output
    runner = make_runner(
        *(random_decoder(config, torch.bfloat16, device), device),
        num_seqs=len(prompts),
        max_len=longest,
        graphs=True,
    )
    serve(runner, prompts, num_output)
    served = serve(runner, prompts, num_output)
    runner.close()
    return served.seconds, served.host_microseconds


def _theirs(config: LlamaConfig, prompts: Prompts, num_output: int, device: torch.device) -> float:
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa"
        )
    generation = GenerationConfig(
        do_sample=False, eos_token_id=-1, pad_token_id=2, max_new_tokens=num_output
    )
    seconds = 0.0
    sizes: dict[str, Any] = {}
    if device.type == "cpu":  # else it fills much of the memory with masks
        small = ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=64)
        sizes = {"continuous_batching_config": small}
    context = model.eval().continuous_batching_context_manager(
        generation_config=generation, **sizes
    )
    with context as manager:
        for _ in range(2):
            start, finished = time.perf_counter(), 0
            for prompt in prompts.values():
                manager.add_request(prompt, max_new_tokens=num_output)
            while finished < len(prompts):
                result = manager.get_result(timeout=1)
                finished += result is not None and result.is_finished()
            seconds = time.perf_counter() - start
    return seconds


def _release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
