"""Every error that leaves the backend, as one tree.

    CBError
    ├── InvalidRequestError          the client's fault; names the field, the value and the limit
    │   └── PromptTooLongError
    ├── OverloadedError              the waiting queue is full; try again
    ├── DeadlineError                the request could not be answered in the time it gives
    ├── EngineUnavailableError
    │   ├── EngineNotReadyError      loading or draining
    │   └── EngineDeadError          the engine thread crashed or hangs
    ├── RequestFailedError           the step that carried this request failed
    ├── ConfigError                  a setting that cannot work
    ├── ModelError                   a model that cannot be found, read or served
    ├── RecordingError               a recording that cannot be read or does not fit together
    └── InternalError                a bug of ours
        ├── InvariantError           a named check of core/invariants.py failed
        ├── OutOfBlocksError         blocks were taken without asking first
        └── WrongThreadError         engine state was touched from another thread

An error that belongs to one request crosses process borders as an `ErrorInfo`.
HTTP statuses are given in serving, nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class ErrorInfo:
    """What of an error travels: a stable code, the message, and the field it is about."""

    code: str
    message: str
    field: str | None = None
    retry_after_s: float | None = None  # when to come back, where that helps


class CBError(Exception):
    """Base of all errors here. `code` is stable and part of the API."""

    code: ClassVar[str] = "internal_error"

    def __init__(
        self, message: str, *, field: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.retry_after_s = retry_after_s

    def info(self) -> ErrorInfo:
        return ErrorInfo(self.code, self.message, self.field, self.retry_after_s)


class InvalidRequestError(CBError):
    code = "invalid_request"


class PromptTooLongError(InvalidRequestError):
    code = "context_length_exceeded"


class OverloadedError(CBError):
    code = "overloaded"


class DeadlineError(CBError):
    code = "deadline_unreachable"


class EngineUnavailableError(CBError):
    code = "engine_unavailable"


class EngineNotReadyError(EngineUnavailableError):
    code = "engine_not_ready"


class EngineDeadError(EngineUnavailableError):
    code = "engine_dead"


class RequestFailedError(CBError):
    code = "request_failed"


class ConfigError(CBError):
    code = "bad_config"


class ModelError(CBError):
    code = "bad_model"


class RecordingError(CBError):
    code = "bad_recording"


class InternalError(CBError):
    code = "internal_error"


class InvariantError(InternalError):
    code = "invariant_violated"


class OutOfBlocksError(InternalError):
    code = "out_of_blocks"


class WrongThreadError(InternalError):
    code = "wrong_thread"


def error_from_info(info: ErrorInfo) -> CBError:
    """The exception that an `ErrorInfo` stands for; an unknown code becomes a plain CBError."""
    kind = _BY_CODE.get(info.code, CBError)
    return kind(info.message, field=info.field, retry_after_s=info.retry_after_s)


def _subclasses(base: type[CBError]) -> list[type[CBError]]:
    direct = base.__subclasses__()
    return direct + [deeper for child in direct for deeper in _subclasses(child)]


_BY_CODE: dict[str, type[CBError]] = {cls.code: cls for cls in _subclasses(CBError)}
