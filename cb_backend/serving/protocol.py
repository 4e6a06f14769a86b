"""The bodies of the OpenAI routes: what is accepted, what is refused, and by which name.

Types are strict, nothing is coerced. Ranges are the engine's to check, in SamplingParams.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError

from cb_backend import limits
from cb_backend.core.sampling_params import SamplingParams
from cb_backend.errors import InvalidRequestError
from cb_backend.serving.api_errors import from_validation
from cb_backend.serving.chat import Message, check_messages

# Known to OpenAI's or vLLM's clients and not done yet: accepted when they ask for nothing.
_NOT_YET: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "guided_json": (),
    "guided_regex": (),
    "length_penalty": (1,),
    "logprobs": (False,),
    "modalities": (["text"],),
    "prediction": (),
    "prompt_logprobs": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "use_beam_search": (False,),
}


def _stop_list(value: object) -> list[str]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise ValueError("should be a string or a list of strings")
    limits.check_at_most("stop", len(stops), limits.MAX_STOP_STRINGS, "strings")
    for position, stop in enumerate(stops):
        if not stop:
            raise ValueError(f"should not have an empty string, at [{position}]")
        if len(stop) > limits.MAX_STOP_STRING_CHARS:
            raise InvalidRequestError(
                f"stop[{position}] may have at most {limits.MAX_STOP_STRING_CHARS} characters,"
                f" got {len(stop)}",
                field="stop",
            )
    return stops


def _prompt_list(value: object) -> list[Any]:
    """One prompt or several, each a text or a list of token ids, as a list of prompts."""
    if isinstance(value, str) or (isinstance(value, list) and value and _is_ids(value)):
        value = [value]
    if not isinstance(value, list):
        raise ValueError("should be a string, a list of token ids, or a list of such prompts")
    if not value:
        raise ValueError("should not be empty")
    limits.check_at_most("prompt", len(value), limits.MAX_PROMPTS_PER_REQUEST, "prompts")
    if not all(isinstance(prompt, str) for prompt in value) and not all(
        isinstance(prompt, list) and _is_ids(prompt) for prompt in value
    ):
        raise ValueError("should hold only strings, only integers, or only lists of integers")
    if not all(value):
        # Even where the tokenizer would add a begin token: nobody means to ask for that.
        raise ValueError("should not be empty")
    return value


def _bias_map(value: object) -> dict[int, Any]:
    """Token ids to numbers, which SamplingParams checks. JSON has ids as strings."""
    if not isinstance(value, dict):
        raise ValueError("should be an object of token ids and numbers")
    limits.check_at_most("logit_bias", len(value), limits.MAX_LOGIT_BIASES, "token ids")
    for key in value:
        # One spelling for one id, so that no two entries are about the same.
        if not re.fullmatch("0|[1-9][0-9]{0,18}", key):
            raise InvalidRequestError(
                f"logit_bias may have token ids for keys, integers of 0 or more, got {key!r:.40}",
                field="logit_bias",
            )
    return {int(key): bias for key, bias in value.items()}


def _is_ids(value: list[object]) -> bool:
    return all(type(item) is int for item in value)


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class _Body(_Strict):
    model: str | None = None


class StreamOptions(_Strict):
    include_usage: bool = False


class _GenerationBody(_Body):
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Annotated[dict[int, Any], PlainValidator(_bias_map)] = {}
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: Annotated[list[str], PlainValidator(_stop_list)] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    n: int = 1
    cache_salt: str = ""
    priority: int = 0
    deadline_s: float | None = None
    pin_prefix_s: float | None = None

    # Labels of the client's own. Accepted, unused.
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling_params(self) -> SamplingParams:
        """Raises InvalidRequestError naming field, value and limit."""
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=self.logit_bias,
            seed=self.seed,
            max_tokens=self._max_tokens(),
            min_tokens=self.min_tokens,
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
        )

    def _max_tokens(self) -> int | None:
        return self.max_tokens

    def check_together(self) -> None:
        """What no single field shows."""
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError(
                "stream_options is only allowed when stream is true", field="stream_options"
            )
        limits.check_at_most(
            "cache_salt", len(self.cache_salt), limits.MAX_CACHE_SALT_CHARS, "characters"
        )
        limits.NUM_CHOICES.check(self.n)


class ChatCompletionBody(_GenerationBody):
    messages: Annotated[list[Message], PlainValidator(check_messages)]
    max_completion_tokens: int | None = None
    parallel_tool_calls: bool | None = None

    def _max_tokens(self) -> int | None:
        if self.max_completion_tokens is None:
            return self.max_tokens
        if self.max_tokens not in (None, self.max_completion_tokens):
            raise InvalidRequestError(
                f"max_tokens ({self.max_tokens}) and max_completion_tokens"
                f" ({self.max_completion_tokens}) differ; give one of them",
                field="max_completion_tokens",
            )
        replace(limits.MAX_TOKENS, field="max_completion_tokens").check(self.max_completion_tokens)
        return self.max_completion_tokens


class CompletionBody(_GenerationBody):
    prompt: Annotated[list[str] | list[list[int]], PlainValidator(_prompt_list)]


class TokenizeBody(_Body):
    """A prompt, or a conversation; exactly one of them."""

    prompt: str | None = None
    messages: Annotated[list[Message], PlainValidator(check_messages)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True

    def check_together(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequestError("give either prompt or messages", field="prompt")


class DetokenizeBody(_Body):
    tokens: list[Annotated[int, Field(ge=0)]]

    def check_together(self) -> None:
        pass


class PolicyBody(_Strict):
    policy: str

    def check_together(self) -> None:
        pass


class KVPoolBody(_Strict):
    num_blocks: int

    def check_together(self) -> None:
        pass


AnyBody = TypeVar(
    "AnyBody",
    ChatCompletionBody,
    CompletionBody,
    TokenizeBody,
    DetokenizeBody,
    PolicyBody,
    KVPoolBody,
)


def parse_body(model: type[AnyBody], fields: dict[str, Any]) -> AnyBody:
    """Raises InvalidRequestError naming the field. A null field is a field left out."""
    given = {name: value for name, value in fields.items() if value is not None}
    for name in [name for name in given if name in _NOT_YET]:
        _check_neutral(name, given.pop(name))
    try:
        body = model.model_validate(given)
    except ValidationError as error:
        raise from_validation(error) from None
    body.check_together()
    return body


def _check_neutral(name: str, value: Any) -> None:
    neutral = _NOT_YET[name]
    # 1 == True and 0 == False in Python, and not in JSON.
    if not any(
        value == allowed and isinstance(value, bool) == isinstance(allowed, bool)
        for allowed in neutral
    ):
        shown = repr(value)
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        remedy = f" or set it to {neutral[0]!r}" if neutral else ""
        raise InvalidRequestError(
            f"{name} is not supported, got {shown}; leave it out{remedy}", field=name
        )
