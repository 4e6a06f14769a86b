"""What a request's parameters do to its logits, token by token as vLLM defines it: an oracle."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from cb_backend.core.sampling_params import SamplingParams


def edited(
    logits: Tensor,
    prompt: Sequence[int],
    output: Sequence[int],
    params: SamplingParams,
    eos_token_ids: Sequence[int] = (),
) -> Tensor:
    """Float32 logits [V] of the token that follows prompt and output."""
    logits = logits.float().clone()
    for token_id, bias in params.logit_bias.items():
        logits[token_id] += bias
    if len(output) < params.min_tokens:
        for token_id in (*params.stop_token_ids, *eos_token_ids):
            logits[token_id] = -torch.inf
    for token_id in {*prompt, *output}:
        logit, penalty = logits[token_id], torch.tensor(params.repetition_penalty)
        logits[token_id] = logit / penalty if logit > 0 else logit * penalty
    for token_id in set(output):
        logits[token_id] -= torch.tensor(params.frequency_penalty) * output.count(token_id)
        logits[token_id] -= params.presence_penalty
    return logits


@torch.inference_mode()
def expected_tokens(
    model: PreTrainedModel,
    prompt: Sequence[int],
    num_tokens: int,
    params: SamplingParams,
    eos_token_ids: Sequence[int] = (),
) -> list[int]:
    """Greedy continuation by transformers, alone and without any cache, up to a stop token."""
    stop_token_ids = {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}
    output: list[int] = []
    while len(output) < num_tokens and not stop_token_ids.intersection(output):
        logits = model(input_ids=torch.tensor([[*prompt, *output]]), use_cache=False).logits[0, -1]
        output.append(int(edited(logits, prompt, output, params, eos_token_ids).argmax()))
    return output
