"""What a client may ask of the sampler and of the end of its request. Plain data, any thread."""

from __future__ import annotations

from dataclasses import dataclass

from cb_backend import limits
from cb_backend.errors import InvalidRequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Validated once, at construction. Raises InvalidRequestError naming field, value and limit."""

    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: all of the vocabulary
    min_p: float = 0.0
    seed: int | None = None  # None: the engine draws one
    max_tokens: int | None = None  # None: what is left of the context
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        limits.TEMPERATURE.check(self.temperature)
        limits.TOP_P.check(self.top_p)
        limits.TOP_K.check(self.top_k)
        limits.MIN_P.check(self.min_p)
        if self.seed is not None:
            limits.SEED.check(self.seed)
        if self.max_tokens is not None:
            limits.MAX_TOKENS.check(self.max_tokens)
        limits.check_at_most(
            "stop_token_ids", len(self.stop_token_ids), limits.MAX_STOP_TOKEN_IDS, "ids"
        )
        if not all(type(token_id) is int and token_id >= 0 for token_id in self.stop_token_ids):
            raise InvalidRequestError(
                "stop_token_ids must be integers of 0 or more", field="stop_token_ids"
            )

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0
