"""The work that every engine in a comparison gets: the same requests, all at once."""

from __future__ import annotations

import random

NUM_REQUESTS = 64
PROMPT_TOKENS = (16, 256)
OUTPUT_TOKENS = (16, 192)  # generated to the last one: end-of-sequence is ignored
TOKEN_IDS = (1000, 40_000)  # ordinary words of any vocabulary of that size


def workload(seed: int = 0) -> list[tuple[list[int], int]]:
    """(prompt_token_ids, num_output_tokens) of each request: 9,204 and 6,897 tokens in all."""
    rng = random.Random(seed)
    return [_request(rng) for _ in range(NUM_REQUESTS)]


def _request(rng: random.Random) -> tuple[list[int], int]:
    # The order of the draws is part of the definition: it makes the numbers comparable with
    # those of other programs that use the same one.
    prompt = [rng.randrange(*TOKEN_IDS) for _ in range(rng.randint(*PROMPT_TOKENS))]
    return prompt, rng.randint(*OUTPUT_TOKENS)
