"""What a gateway and a runner say to each other, as JSON. Pure functions, any thread.

A gateway opens one stream of lines, its session, and numbers its requests in it. Each line has
what one step gave the session's requests; an empty list is a heartbeat. The runner draws the
request ids and keeps them: the number, or tag, is known before any event can arrive.
"""

from __future__ import annotations

import json
from dataclasses import asdict, astuple, dataclass, fields
from typing import Any

from cb_backend.core.explain import RequestView
from cb_backend.core.request import FinishReason, RequestCost
from cb_backend.core.sampling_params import SamplingParams
from cb_backend.core.step_io import ModelInfo, TokenEvent
from cb_backend.core.swap_costs import SwapCosts
from cb_backend.errors import ErrorInfo
from cb_backend.serving.engine_client import EngineHealth, GenerateRequest

MODEL_PATH = "/internal/model"
HEALTH_PATH = "/internal/health"
EVENTS_PATH = "/internal/events"
REQUESTS_PATH = "/internal/requests"
ABORT_PATH = "/internal/abort"
VIEWS_PATH = "/internal/views"
TRACE_PATH = "/internal/trace"
POLICY_PATH = "/internal/policy"
KV_POOL_PATH = "/internal/kv_pool"

HEARTBEAT = b"[]\n"


@dataclass(frozen=True, slots=True)
class Submission:
    session: str
    tag: int  # of the first choice; the others have the numbers that follow
    request: GenerateRequest


def encode_submission(submission: Submission) -> dict[str, Any]:
    request = submission.request
    # Field by field: asdict would copy a prompt of any length, token by token.
    fields_of = {field.name: getattr(request, field.name) for field in fields(request)}
    return {
        "session": submission.session,
        "tag": submission.tag,
        "request": {**fields_of, "params": asdict(request.params)},
    }


def decode_submission(data: dict[str, Any]) -> Submission:
    params = data["request"]["params"]
    params = SamplingParams(
        **{
            **params,
            "stop_token_ids": tuple(params["stop_token_ids"]),
            # JSON's keys are strings.
            "logit_bias": {int(token_id): bias for token_id, bias in params["logit_bias"].items()},
        }
    )
    request = GenerateRequest(**{**data["request"], "params": params})
    return Submission(data["session"], data["tag"], request)


def encode_hello(session: str) -> bytes:
    return _line({"session": session})


def decode_hello(line: bytes) -> str:
    session = json.loads(line)["session"]
    assert isinstance(session, str)
    return session


def encode_step(events: list[tuple[int, TokenEvent]]) -> bytes:
    """One line. All events of a step have its number and time."""
    _, first = events[0]
    return _line([first.step, first.time, [_encode_event(tag, event) for tag, event in events]])


def decode_step(line: bytes) -> list[tuple[int, TokenEvent]]:
    """Empty for a heartbeat."""
    data = json.loads(line)
    if not data:
        return []
    step, time, rows = data
    return [(row[0], _decode_event(row, step, time)) for row in rows]


def encode_model_info(info: ModelInfo) -> dict[str, Any]:
    return asdict(info)


def decode_model_info(data: dict[str, Any]) -> ModelInfo:
    return ModelInfo(
        **{
            **data,
            "eos_token_ids": tuple(data["eos_token_ids"]),
            "swap_costs": SwapCosts(**data["swap_costs"]),
        }
    )


def encode_views(views: list[RequestView]) -> dict[str, Any]:
    return {"views": [asdict(view) for view in views]}


def decode_views(data: dict[str, Any]) -> list[RequestView]:
    return [RequestView(**view) for view in data["views"]]


def encode_health(health: EngineHealth) -> dict[str, Any]:
    return asdict(health)


def decode_health(data: dict[str, Any]) -> EngineHealth:
    return EngineHealth(**data)


def encode_error(info: ErrorInfo) -> dict[str, Any]:
    return asdict(info)


def decode_error(data: dict[str, Any]) -> ErrorInfo:
    return ErrorInfo(**data)


def _encode_event(tag: int, event: TokenEvent) -> list[Any]:
    """Nearly all events are one token and nothing else, so the rest is left out where it can."""
    row: list[Any] = [tag, event.token_ids]
    if event.num_cached_tokens or event.finish_reason is not None:
        row.append(event.num_cached_tokens)
    if event.finish_reason is not None:
        row.append(event.finish_reason)
        row.append(None if event.cost is None else astuple(event.cost))
    if event.error is not None:
        row.append(encode_error(event.error))
    return row


def _decode_event(row: list[Any], step: int, time: float) -> TokenEvent:
    return TokenEvent(  # by place: in half the time
        str(row[0]),
        tuple(row[1]),
        step,
        time,
        row[2] if len(row) > 2 else 0,
        FinishReason(row[3]) if len(row) > 3 else None,
        decode_error(row[5]) if len(row) > 5 else None,
        RequestCost(*row[4]) if len(row) > 4 and row[4] else None,
    )


def _line(data: Any) -> bytes:
    return json.dumps(data, separators=(",", ":")).encode("ascii") + b"\n"
