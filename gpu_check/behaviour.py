"""What a model runner promises on a GPU: the same bits in any company, the same tokens from graphs,
and no wait in a step but one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor
from transformers import LlamaConfig, PretrainedConfig

from cb_backend.runtime.rehearsal import rehearse
from gpu_check.kernels import Correct
from gpu_check.models import LLAMA, TINY, mixture, random_decoder
from gpu_check.serving import make_runner, recorded_logits, serve

Prompts = dict[str, list[int]]


def correct(device: torch.device, *, tiny: bool) -> Iterator[Correct]:
    plain = LlamaConfig(**(TINY | {"num_hidden_layers": 1, "vocab_size": 64} if tiny else LLAMA))
    for config in (plain, mixture(tiny=tiny)):
        yield from _correct(config, device, tiny=tiny)


def _correct(config: PretrainedConfig, device: torch.device, *, tiny: bool) -> Iterator[Correct]:
    torch.manual_seed(0)
    lengths = (1, 5) if tiny else (1, 37, 130, 1200)
    prompts: Prompts = {str(n): torch.randint(3, config.vocab_size, (n,)).tolist() for n in lengths}
    num_tokens, max_len = (2, 32) if tiny else (8, 2048)
    kind = config.model_type

    def logits(
        dtype: torch.dtype, *, alone: bool = False, fixed: bool = False, graphs: bool = False
    ) -> Tensor:
        runner = make_runner(
            *(random_decoder(config, dtype, device, deterministic=fixed), device),
            num_seqs=len(lengths),
            max_len=max_len,
            deterministic=fixed,
            graphs=graphs,
        )
        ways = [{name: prompt} for name, prompt in prompts.items()] if alone else [prompts]
        with recorded_logits(runner) as kept:
            for way in ways:
                serve(runner, way, num_tokens, budget=max_len if alone else 64)
        runner.close()
        return torch.stack([kept[key] for key in sorted(kept)]).double().cpu()

    half, single = torch.bfloat16, torch.float32
    yield Correct(
        *("deterministic", f"alone and in chunks, {kind}"),
        lambda: logits(half, fixed=True),
        lambda: logits(half, fixed=True, alone=True),
        tolerance=0.0,
    )
    yield Correct(
        *("graphs", f"deterministic, {kind}"),
        lambda: logits(half, fixed=True, graphs=True),
        lambda: logits(half, fixed=True),
        tolerance=0.0,
    )
    yield Correct(
        *("graphs", f"float32, {kind}"),
        lambda: logits(single, graphs=True),
        lambda: logits(single),
        tolerance=1e-3,
        least=1.0,
    )
    for graphs in (False, True):
        yield Correct(
            *("no wait in a step", f"{'graphs' if graphs else 'eager'}, {kind}"),
            partial(_without_waits, config, prompts, device, graphs=graphs),
            lambda: torch.zeros(1),
            tolerance=0.0,
        )


def _without_waits(
    config: PretrainedConfig, prompts: Prompts, device: torch.device, *, graphs: bool
) -> Tensor:
    """Raises where torch sees the host wait; the one read waits for an event, which it allows."""
    runner = make_runner(
        *(random_decoder(config, torch.bfloat16, device), device),
        num_seqs=len(prompts),
        max_len=2048,
        graphs=graphs,
    )
    if device.type == "cuda":  # as when a server starts
        most = {"max_num_seqs": len(prompts), "max_num_batched_tokens": 512}
        rehearse(runner, **most, num_host_blocks=0)
    serve(runner, prompts, 2)  # what is set up at first use may wait
    with _no_waits() if device.type == "cuda" else nullcontext():
        serve(runner, prompts, 3, budget=100)
    runner.close()
    return torch.zeros(1)


@contextmanager
def _no_waits() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
