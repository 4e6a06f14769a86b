"""What a client may ask of the sampler and of the end of its request. Plain data, any thread."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from cb_backend import limits
from cb_backend.errors import InvalidRequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Validated once, at construction. Raises InvalidRequestError naming field, value and limit."""

    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: all of the vocabulary
    min_p: float = 0.0
    presence_penalty: float = 0.0  # taken once from the logit of each token that was generated
    frequency_penalty: float = 0.0  # and this for each time that it was
    repetition_penalty: float = 1.0  # divides the logit of what prompt or output has; 1: none
    # Added to a token's logit, before the penalties.
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    seed: int | None = None  # None: the engine draws one
    max_tokens: int | None = None  # None: what is left of the context
    min_tokens: int = 0  # before so many, no end of text and no stop token is sampled
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        limits.TEMPERATURE.check(self.temperature)
        limits.TOP_P.check(self.top_p)
        limits.TOP_K.check(self.top_k)
        limits.MIN_P.check(self.min_p)
        limits.PRESENCE_PENALTY.check(self.presence_penalty)
        limits.FREQUENCY_PENALTY.check(self.frequency_penalty)
        limits.REPETITION_PENALTY.check(self.repetition_penalty)
        limits.check_at_most(
            "logit_bias", len(self.logit_bias), limits.MAX_LOGIT_BIASES, "token ids"
        )
        _check_ids("logit_bias", self.logit_bias)
        for bias in self.logit_bias.values():
            limits.LOGIT_BIAS.check(bias)
        if self.seed is not None:
            limits.SEED.check(self.seed)
        if self.max_tokens is not None:
            limits.MAX_TOKENS.check(self.max_tokens)
        limits.MIN_TOKENS.check(self.min_tokens)
        if self.max_tokens is not None:
            limits.check_min_tokens(self.min_tokens, self.max_tokens)
        limits.check_at_most(
            "stop_token_ids", len(self.stop_token_ids), limits.MAX_STOP_TOKEN_IDS, "ids"
        )
        _check_ids("stop_token_ids", self.stop_token_ids)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalizes(self) -> bool:
        """Whether what to draw depends on which tokens have been there."""
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0, 0, 1)


def _check_ids(field_name: str, token_ids: Iterable[object]) -> None:
    for token_id in token_ids:
        if type(token_id) is not int or token_id < 0:
            raise InvalidRequestError(
                f"{field_name} must have token ids, integers of 0 or more, got {token_id!r:.40}",
                field=field_name,
            )
