"""Writes down what a live engine is asked and decides, as JSON lines. Engine thread only, but for
`open_recorder`.

Everything that a replay needs, and nothing that was said: no text and no token ids. Blocks of a
prompt appear as hashes under a key that is never written, so that equal beginnings can be told
and nothing can be guessed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import secrets
from collections.abc import Mapping, Sequence

from cb_backend.core.prefix_cache import extend_block_hashes
from cb_backend.core.recorded_step import FORMAT, Json, decision
from cb_backend.core.request import FinishReason, Request
from cb_backend.core.scheduler_limits import SchedulerLimits
from cb_backend.core.step_io import ModelInfo, StepPlan, StepResult, TokenEvent
from cb_backend.engine.line_file import LineFile, open_new
from cb_backend.errors import ErrorInfo

_FLUSH_INTERVAL_S = 1.0  # under load: what a killed process loses
_HASH_BYTES = 8


@dataclasses.dataclass(frozen=True, slots=True)
class RecordedSettings:
    """What decides beside the requests themselves."""

    limits: SchedulerLimits
    policy: str
    priority_ageing_s: float
    tenant_weights: Mapping[str, float]
    target_itl_s: float | None


class Recorder:
    """What an engine tells while it works. This one keeps nothing: recording is off."""

    def begin(self, settings: RecordedSettings, model: ModelInfo, now: float) -> None:
        """The engine is built."""

    def arrived(self, request: Request) -> None:
        """The engine has taken it in; before its first step."""

    def refused(self, request: Request, error: ErrorInfo) -> None:
        """The engine has not taken it in."""

    def aborting(self, request_id: str) -> None:
        """Before its blocks are released. It may have ended already."""

    def changed(self, what: str, to: str | int) -> None:
        """A setting that decides has another value from now on."""

    def restored(self, digests: Sequence[bytes], num_blocks: int) -> None:
        """Before the first step: so many blocks were filled from a file, with these prefixes."""

    def stepped(
        self,
        plan: StepPlan,
        result: StepResult | ErrorInfo,
        events: Sequence[TokenEvent],
        *,
        token_budget: int,
        seconds: float,
        now: float,
    ) -> None:
        """A step is over; `result` is an error if it raised, `events` is what came of it."""

    def ended(self, events: Sequence[TokenEvent]) -> None:
        """Some of these are the last of their requests."""

    def close(self) -> None:
        """Nothing more will come."""


def open_recorder(path: str | None) -> Recorder:
    """Raises ConfigError if `path` names a file that cannot be written; None records nothing."""
    return Recorder() if path is None else FileRecorder(open_new(path))


class FileRecorder(Recorder):
    """One JSON object a line, each with its `kind`."""

    def __init__(self, lines: LineFile) -> None:
        self._lines = lines
        self._flush_at = -math.inf  # seconds, the engine's clock
        self._key = secrets.token_bytes(32)
        self._block_size = 0  # 0: no prefix caching, so nobody looks at blocks
        self._num_arrived = 0
        self._live: dict[str, Request] = {}
        self._numbers: dict[
            str, int
        ] = {}  # of the live, and of the ended until a step retires them
        self._ended: list[str] = []

    def begin(self, settings: RecordedSettings, model: ModelInfo, now: float) -> None:
        if settings.limits.enable_prefix_caching:
            self._block_size = settings.limits.block_size
        weights = {self._hash_tenant(t): w for t, w in settings.tenant_weights.items()}
        self._write(
            "header",
            {
                "format": FORMAT,
                "start": now,
                **dataclasses.asdict(settings),
                "tenant_weights": weights,
                "model": dataclasses.asdict(model),
            },
        )
        self._lines.flush()

    def arrived(self, request: Request) -> None:
        number = self._numbers[request.request_id] = self._num_arrived
        self._num_arrived += 1
        self._live[request.request_id] = request
        self._write(
            "arrival",
            {
                "request": number,
                # As exact as it is compared: ageing orders requests by it.
                "time": request.arrival_time,
                "prompt": request.num_prompt_tokens,
                "max_tokens": request.max_tokens,
                "priority": request.priority,
                "tenant": self._hash_tenant(request.tenant),
                "deadline": None if math.isinf(request.deadline) else request.deadline,
                # Numbers, since a request's own id may hold a label of its client's.
                "fork_of": self._numbers.get(request.fork_of or ""),
                "pin_s": request.pin_s,
                "blocks": self._hash_blocks(request, 0),
            },
        )

    def refused(self, request: Request, error: ErrorInfo) -> None:
        self._write(
            "refused",
            {
                "time": request.arrival_time,
                "prompt": request.num_prompt_tokens,
                "max_tokens": request.max_tokens,
                "code": error.code,
            },
        )

    def aborting(self, request_id: str) -> None:
        if request_id in self._live:
            self._write("abort", {"request": self._numbers[request_id]})

    def changed(self, what: str, to: str | int) -> None:
        self._write("change", {"what": what, "to": to})

    def restored(self, digests: Sequence[bytes], num_blocks: int) -> None:
        blocks = [self._hash(digest) for digest in digests]
        self._write("restored", {"blocks": blocks, "num_blocks": num_blocks})

    def stepped(
        self,
        plan: StepPlan,
        result: StepResult | ErrorInfo,
        events: Sequence[TokenEvent],
        *,
        token_budget: int,
        seconds: float,
        now: float,
    ) -> None:
        line: Json = {
            "step": plan.step,
            "end": now,  # exact, since pins end by it
            "seconds": round(seconds, 6),
            **decision(plan, token_budget, self._numbers),
        }
        if isinstance(result, ErrorInfo):
            line["failed"] = True  # all of them
        elif result.failed:
            line["failed"] = [self._numbers[request_id] for request_id in result.failed]
        took = [
            [self._numbers[event.request_id], len(event.token_ids)]
            for event in events
            if len(event.token_ids) > 1
        ]
        if took:
            line["took"] = took
        self._write("step", line)
        for request_id in self._ended:  # this step has told the executor
            del self._numbers[request_id]
        self._ended.clear()
        if now >= self._flush_at:
            self._flush_at = now + _FLUSH_INTERVAL_S
            self._lines.flush()

    def ended(self, events: Sequence[TokenEvent]) -> None:
        for event in events:
            if event.finish_reason is not None and event.request_id in self._live:
                self._write_end(self._live.pop(event.request_id), event.finish_reason)
                self._ended.append(event.request_id)
        if not self._live:
            self._lines.flush()

    def close(self) -> None:
        """What lives still is written with what is known of it."""
        for request in self._live.values():
            self._write_end(request, None)
        self._live.clear()
        self._lines.close()

    def _write_end(self, request: Request, reason: FinishReason | None) -> None:
        num_known = request.num_prompt_tokens // self._block_size if self._block_size else 0
        self._write(
            "end",
            {
                "request": self._numbers[request.request_id],
                "reason": reason,
                "output": request.num_output_tokens,
                "blocks": self._hash_blocks(request, num_known),
            },
        )

    def _hash_blocks(self, request: Request, first: int) -> list[str]:
        """The full blocks of all known tokens, from block `first` on."""
        if not self._block_size:
            return []
        extend_block_hashes(
            request.block_hashes,
            request.token_ids,
            block_size=self._block_size,
            salt=request.cache_salt,
        )
        return [self._hash(digest) for digest in request.block_hashes[first:]]

    def _hash_tenant(self, tenant: str) -> str:
        return self._hash(tenant.encode()) if tenant else ""

    def _hash(self, data: bytes) -> str:
        return hashlib.blake2b(data, key=self._key, digest_size=_HASH_BYTES).hexdigest()

    def _write(self, kind: str, line: Json) -> None:
        self._lines.append(json.dumps({"kind": kind, **line}, separators=(",", ":")))
