"""A conversation as a prompt: checked messages, and the model's own chat template.

Templates are the model's; transformers renders them in its sandbox. Rendering is for a thread:
its time depends on the client's text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from cb_backend import limits
from cb_backend.errors import InvalidRequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# As the template sees it: role, content as one string, and whatever else the client gave.
Message = dict[str, Any]


def check_messages(value: object) -> list[Message]:
    """Raises InvalidRequestError with the position of what is wrong; field is `messages`."""
    if not isinstance(value, list):
        raise _invalid("messages must be a list")
    if not value:
        raise _invalid("messages must not be empty")
    limits.check_at_most("messages", len(value), limits.MAX_MESSAGES, "messages")
    return [_check_message(message, f"messages[{index}]") for index, message in enumerate(value)]


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = True,
) -> str:
    """Raises InvalidRequestError when the template refuses the conversation."""
    if not tokenizer.chat_template:
        raise _invalid("this model has no chat template; use /v1/completions")
    try:
        text = tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=add_generation_prompt
        )
    # Templates are programs: besides their own raise_exception, they fail on a message that lacks
    # what they read.
    except (TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
        raise _invalid(f"the model's chat template refuses these messages: {error}") from error
    assert isinstance(text, str)
    return text


def _check_message(message: object, where: str) -> Message:
    if not isinstance(message, dict):
        raise _invalid(f"{where} must be an object")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise _invalid(f"{where}.role must be a string such as user, got {role!r}")
    content = message.get("content")
    if content is None:
        # An assistant's turn that only called tools has no text.
        if role != "assistant":
            raise _invalid(f"{where}.content is required")
        content = ""
    elif isinstance(content, list):
        content = "\n".join(
            _text_of_part(part, f"{where}.content[{index}]") for index, part in enumerate(content)
        )
    elif not isinstance(content, str):
        raise _invalid(f"{where}.content must be a string or a list of text parts")
    return {**message, "content": content}


def _text_of_part(part: object, where: str) -> str:
    if not isinstance(part, dict):
        raise _invalid(f"{where} must be an object")
    if part.get("type") != "text":
        raise _invalid(f"{where}.type must be text, got {part.get('type')!r}")
    text = part.get("text")
    if not isinstance(text, str):
        raise _invalid(f"{where}.text must be a string")
    return text


def _invalid(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, field="messages")
