"""The work that every engine in a comparison gets: the same requests, from a seed.

Standard library only: peers read it with a python of their own.
"""

from __future__ import annotations

import random

Requests = list[tuple[list[int], int]]  # prompt_token_ids, num_output_tokens

NUM_REQUESTS = 64
PROMPT_TOKENS = (16, 256)
OUTPUT_TOKENS = (16, 192)  # generated to the last one: end-of-sequence is ignored
TOKEN_IDS = (1000, 40_000)  # ordinary words of any vocabulary of that size

NUM_LONG_REQUESTS = 16
LONG_PROMPT_TOKENS = 4000
LONG_OUTPUT_TOKENS = (16, 64)

SINGLE_PROMPT_TOKENS, SINGLE_OUTPUT_TOKENS = 16, 64

PREFIX_TOKENS = 1000
TAIL_TOKENS = (16, 64)
PREFIX_OUTPUT_TOKENS = (16, 96)


def workload(seed: int = 0, num_requests: int = NUM_REQUESTS) -> Requests:
    """Mixed lengths. The 64 of seed 0 have 9,204 prompt and 6,897 output tokens in all."""
    rng = random.Random(seed)
    return [_request(rng) for _ in range(num_requests)]


def long_prompts(max_model_len: int, num_requests: int = NUM_LONG_REQUESTS) -> Requests:
    """Prompts of 4,000 tokens, or of what the model's context leaves beside the output."""
    rng = random.Random(0)
    num_prompt = min(LONG_PROMPT_TOKENS, max_model_len - LONG_OUTPUT_TOKENS[1])
    return [
        (_tokens(rng, num_prompt), rng.randint(*LONG_OUTPUT_TOKENS)) for _ in range(num_requests)
    ]


def shared_prefix(num_requests: int = NUM_REQUESTS) -> Requests:
    """One beginning of 1,000 tokens, as a system prompt has, and short tails of their own."""
    rng = random.Random(0)
    prefix = _tokens(rng, PREFIX_TOKENS)
    return [
        (prefix + _tokens(rng, rng.randint(*TAIL_TOKENS)), rng.randint(*PREFIX_OUTPUT_TOKENS))
        for _ in range(num_requests)
    ]


def single(num_requests: int = 1) -> Requests:
    """Mostly decoding, over before the machine changes its speed: to be sent one at a time."""
    rng = random.Random(0)
    return [(_tokens(rng, SINGLE_PROMPT_TOKENS), SINGLE_OUTPUT_TOKENS) for _ in range(num_requests)]


WORKLOADS = ("mixed", "long", "prefix", "single")


def requests_of(name: str, max_model_len: int, num_requests: int | None = None) -> Requests:
    """A workload by name; each has a number of requests of its own unless one is given."""
    match name:
        case "mixed":
            return workload(num_requests=num_requests or NUM_REQUESTS)
        case "long":
            return long_prompts(max_model_len, num_requests or NUM_LONG_REQUESTS)
        case "prefix":
            return shared_prefix(num_requests or NUM_REQUESTS)
        case "single":
            return single(num_requests or 1)
    raise ValueError(f"no workload {name!r}; there are {', '.join(WORKLOADS)}")


def _request(rng: random.Random) -> tuple[list[int], int]:
    # The order of the draws is part of the definition: it makes the numbers comparable with
    # those of other programs that use the same one.
    return _tokens(rng, rng.randint(*PROMPT_TOKENS)), rng.randint(*OUTPUT_TOKENS)


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(*TOKEN_IDS) for _ in range(count)]
