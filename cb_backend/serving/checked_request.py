"""What a service submits, held against every limit, as requests of the engine. Pure; any thread.

A submission of several choices becomes as many requests: the first, and forks that share its
prompt. The engine computes that prompt once.
"""

from __future__ import annotations

import itertools
import math
import secrets
import uuid
from collections.abc import Iterable

from cb_backend import limits
from cb_backend.core.request import Request
from cb_backend.core.step_io import ModelInfo
from cb_backend.errors import InvalidRequestError, PromptTooLongError
from cb_backend.serving.engine_client import GenerateRequest

_numbers = itertools.count(1)  # two requests with one label still have two ids


def checked_requests(
    request: GenerateRequest, info: ModelInfo, *, now: float, prefix_caching: bool
) -> list[Request]:
    """One for each choice, the first to be queued first. Raises InvalidRequestError.

    `now` is the arrival, in seconds of the engine's clock.
    """
    _check(request, info, prefix_caching)
    params, num_prompt_tokens = request.params, len(request.prompt_token_ids)
    max_tokens = _resolve_max_tokens(params.max_tokens, num_prompt_tokens, info.max_model_len)
    limits.check_min_tokens(params.min_tokens, max_tokens)
    stop_token_ids = frozenset(params.stop_token_ids)
    if not params.ignore_eos:
        stop_token_ids = stop_token_ids.union(info.eos_token_ids)
    request_ids = [_draw_id(request.label) for _ in range(request.n)]
    return [
        Request(
            request_id=request_id,
            token_ids=list(request.prompt_token_ids),
            num_prompt_tokens=num_prompt_tokens,
            params=params,
            max_tokens=max_tokens,
            stop_token_ids=stop_token_ids,
            seed=_seed_of(params.seed, choice),
            arrival_time=now,
            # Without a slash in a tenant's name, no two tenants have a salt in common.
            cache_salt=f"{request.tenant}/{request.cache_salt}",
            priority=request.priority,
            tenant=request.tenant,
            deadline=math.inf if request.deadline_s is None else now + request.deadline_s,
            fork_of=request_ids[0] if choice else None,
            pin_s=0.0 if choice else request.pin_prefix_s or 0.0,
        )
        for choice, request_id in enumerate(request_ids)
    ]


def _check(request: GenerateRequest, info: ModelInfo, prefix_caching: bool) -> None:
    _check_token_ids("prompt", request.prompt_token_ids, info.vocab_size)
    _check_token_ids("stop_token_ids", request.params.stop_token_ids, info.vocab_size)
    _check_token_ids("logit_bias", request.params.logit_bias, info.vocab_size)
    limits.PRIORITY.check(request.priority)
    limits.NUM_CHOICES.check(request.n)
    limits.check_name("tenant", request.tenant, limits.MAX_TENANT_CHARS)
    limits.check_name("label", request.label, limits.MAX_LABEL_CHARS)
    limits.check_at_most(
        "cache_salt", len(request.cache_salt), limits.MAX_CACHE_SALT_CHARS, "characters"
    )
    if request.deadline_s is not None:
        limits.DEADLINE_S.check(request.deadline_s)
    if request.pin_prefix_s is not None:
        limits.PIN_PREFIX_S.check(request.pin_prefix_s)
        if not prefix_caching:
            raise InvalidRequestError(
                "pin_prefix_s keeps a prefix in the prefix cache, which this server has switched"
                " off (enable_prefix_caching); leave it out",
                field="pin_prefix_s",
            )


def _draw_id(label: str) -> str:
    return f"{label}-{next(_numbers)}" if label else uuid.uuid4().hex


def _seed_of(seed: int | None, choice: int) -> int:
    """A given seed gives the same set of choices again, each of them sampled differently."""
    if seed is None:
        return secrets.randbits(63)
    num_seeds = int(limits.SEED.high) - int(limits.SEED.low) + 1
    return (seed + choice - int(limits.SEED.low)) % num_seeds + int(limits.SEED.low)


def _check_token_ids(field: str, token_ids: Iterable[int], vocab_size: int) -> None:
    for token_id in token_ids:
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            raise InvalidRequestError(
                f"{field} has the token id {token_id!r:.40}; ids must be integers from 0 to"
                f" {vocab_size - 1}",
                field=field,
            )


def _resolve_max_tokens(wanted: int | None, num_prompt_tokens: int, max_model_len: int) -> int:
    """`wanted`, or what is left of the context. Raises when prompt and output do not fit."""
    if num_prompt_tokens == 0:
        raise InvalidRequestError("prompt must have at least 1 token, got 0", field="prompt")
    limits.check_prompt_fits(num_prompt_tokens, max_model_len)
    left = max_model_len - num_prompt_tokens
    if wanted is not None and wanted > left:
        raise PromptTooLongError(
            f"prompt has {num_prompt_tokens} tokens and max_tokens asks for {wanted} more, but"
            f" this model's context is {max_model_len} tokens; at most {left} can be asked for",
            field="max_tokens",
        )
    return left if wanted is None else wanted
