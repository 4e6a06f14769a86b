"""Every cap on what one request may ask for, in one table.

The engine's border (`serving/async_engine.py`, through `SamplingParams`) enforces the ones that
concern the engine; the HTTP edge enforces the ones that concern bodies and text. A test walks the
table at each cap and just past it.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from cb_backend.errors import InvalidRequestError, PromptTooLongError


@dataclass(frozen=True, slots=True)
class Limit:
    """A closed range for one numeric field. `above` makes the lower end exclusive."""

    field: str
    low: float
    high: float
    integer: bool = False
    above: bool = False

    def check(self, value: object) -> None:
        """Raise InvalidRequestError unless `value` is a finite number inside the range."""
        if isinstance(value, bool) or not isinstance(value, int if self.integer else (int, float)):
            kind = "an integer" if self.integer else "a number"
            raise InvalidRequestError(
                f"{self.field} must be {kind}, got {_short(value)}", field=self.field
            )
        if isinstance(value, float) and not math.isfinite(value):
            raise InvalidRequestError(
                f"{self.field} must be finite, got {value}; it may be {self.range_text}",
                field=self.field,
            )
        if not (self.low < value if self.above else self.low <= value) or value > self.high:
            raise InvalidRequestError(
                f"{self.field} must be {self.range_text}, got {_short(value)}", field=self.field
            )

    @property
    def range_text(self) -> str:
        low = f"above {self.low:g}" if self.above else f"at least {_number(self.low)}"
        return f"{low} and at most {_number(self.high)}"


INT64_MAX = 2**63 - 1

TEMPERATURE = Limit("temperature", 0.0, 100.0)
TOP_P = Limit("top_p", 0.0, 1.0, above=True)
TOP_K = Limit("top_k", -1, 2**31 - 1, integer=True)
MIN_P = Limit("min_p", 0.0, 1.0)
PRESENCE_PENALTY = Limit("presence_penalty", -2.0, 2.0)
FREQUENCY_PENALTY = Limit("frequency_penalty", -2.0, 2.0)
REPETITION_PENALTY = Limit("repetition_penalty", 0.0, 100.0, above=True)
LOGIT_BIAS = Limit("logit_bias", -100.0, 100.0)  # of one token
SEED = Limit("seed", -(2**63), INT64_MAX, integer=True)
MAX_TOKENS = Limit("max_tokens", 1, 2**31 - 1, integer=True)
MIN_TOKENS = Limit("min_tokens", 0, 2**31 - 1, integer=True)
PRIORITY = Limit("priority", -(2**31), 2**31 - 1, integer=True)
NUM_CHOICES = Limit("n", 1, 16, integer=True)
DEADLINE_S = Limit("deadline_s", 0.0, 86_400.0, above=True)
PIN_PREFIX_S = Limit("pin_prefix_s", 0.0, 86_400.0, above=True)

NUMERIC_LIMITS: tuple[Limit, ...] = (
    TEMPERATURE,
    TOP_P,
    TOP_K,
    MIN_P,
    PRESENCE_PENALTY,
    FREQUENCY_PENALTY,
    REPETITION_PENALTY,
    LOGIT_BIAS,
    SEED,
    MAX_TOKENS,
    MIN_TOKENS,
    PRIORITY,
    NUM_CHOICES,
    DEADLINE_S,
    PIN_PREFIX_S,
)

MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIASES = 1024
MAX_CACHE_SALT_CHARS = 256
MAX_TENANT_CHARS = 64
MAX_LABEL_CHARS = 128

# The HTTP edge.
MAX_BODY_BYTES = 8 * 2**20
MAX_JSON_DEPTH = 64
MAX_MESSAGES = 4096
MAX_PROMPTS_PER_REQUEST = 64
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 256
MAX_ERROR_CHARS = 2048  # of an error's message: it may quote the client


def check_at_most(field: str, count: int, limit: int, unit: str) -> None:
    """Raise InvalidRequestError when `count` of something is past its cap."""
    if count > limit:
        raise InvalidRequestError(
            f"{field} may have at most {limit} {unit}, got {count}", field=field
        )


def check_name(field: str, name: str, max_chars: int) -> None:
    """Raise InvalidRequestError unless `name` is short and of characters without a meaning in
    URLs, settings and cache salts. Empty is no name, and allowed."""
    check_at_most(field, len(name), max_chars, "characters")
    if not _NAME.fullmatch(name):
        raise InvalidRequestError(
            f"{field} may have letters, digits and ._:@+- only, got {_short(name)}", field=field
        )


_NAME = re.compile(r"[A-Za-z0-9._:@+-]*")


def check_prompt_fits(num_prompt_tokens: int, max_model_len: int) -> None:
    """Raise PromptTooLongError when the context has no room for an answer of one token."""
    if num_prompt_tokens >= max_model_len:
        raise PromptTooLongError(
            f"prompt has {num_prompt_tokens} tokens, but this model's context of {max_model_len}"
            f" tokens leaves room for at most {max_model_len - 1}; shorten it",
            field="prompt",
        )


def check_min_tokens(min_tokens: int, max_tokens: int) -> None:
    """Raise InvalidRequestError when an answer would have to be longer than it may."""
    if min_tokens > max_tokens:
        raise InvalidRequestError(
            f"min_tokens must be at most max_tokens, which is {max_tokens}, got {min_tokens}",
            field="min_tokens",
        )


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() and abs(value) > 1e6 else f"{value:g}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
