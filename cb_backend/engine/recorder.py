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

    def launched(self, plan: StepPlan, token_budget: int) -> None:
        """A step has been decided upon."""

    def stepped(
        self,
        plan: StepPlan,
        result: StepResult | ErrorInfo,
        events: Sequence[TokenEvent],
        *,
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


class KeyedHashes:
    """Of what a recording must not tell, under a key that nobody keeps."""

    def __init__(self) -> None:
        self.block_size = 0  # tokens; 0: no prefix caching, so nobody looks at blocks
        self._key = secrets.token_bytes(32)

    def of(self, data: bytes) -> str:
        return hashlib.blake2b(data, key=self._key, digest_size=_HASH_BYTES).hexdigest()

    def of_tenant(self, tenant: str) -> str:
        return self.of(tenant.encode()) if tenant else ""

    def of_blocks(self, request: Request, num_tokens_before: int) -> list[str]:
        """The full blocks of all known tokens but those of so many first ones."""
        if not self.block_size:
            return []
        extend_block_hashes(
            request.block_hashes,
            request.token_ids,
            block_size=self.block_size,
            salt=request.cache_salt,
        )
        first = num_tokens_before // self.block_size
        return [self.of(digest) for digest in request.block_hashes[first:]]


class FileRecorder(Recorder):
    """One JSON object a line, each with its `kind`.

    A step that ends before anything else happens is one line. Of another, the decision is a line
    of its own, "launch", and "step" tells what came of it: a replay must know what came between.
    """

    def __init__(self, lines: LineFile) -> None:
        self._lines = lines
        self._flush_at = -math.inf  # seconds, the engine's clock
        self._hashes = KeyedHashes()
        self._num_arrived = 0
        self._launched: tuple[int, Json] | None = None  # the last step and its decision, unwritten
        self._live: dict[str, Request] = {}
        self._numbers: dict[
            str, int
        ] = {}  # of the live, and of the ended until a step retires them
        self._ended: list[str] = []

    def begin(self, settings: RecordedSettings, model: ModelInfo, now: float) -> None:
        if settings.limits.enable_prefix_caching:
            self._hashes.block_size = settings.limits.block_size
        weights = {self._hashes.of_tenant(t): w for t, w in settings.tenant_weights.items()}
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
                "tenant": self._hashes.of_tenant(request.tenant),
                "deadline": None if math.isinf(request.deadline) else request.deadline,
                # Numbers, since a request's own id may hold a label of its client's.
                "fork_of": self._numbers.get(request.fork_of or ""),
                "pin_s": request.pin_s,
                "blocks": self._hashes.of_blocks(request, 0),
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
        blocks = [self._hashes.of(digest) for digest in digests]
        self._write("restored", {"blocks": blocks, "num_blocks": num_blocks})

    def launched(self, plan: StepPlan, token_budget: int) -> None:
        self._write_launch()
        self._launched = plan.step, decision(plan, token_budget, self._numbers)
        for request_id in self._ended:  # this step tells the executor
            del self._numbers[request_id]
        self._ended.clear()

    def stepped(
        self,
        plan: StepPlan,
        result: StepResult | ErrorInfo,
        events: Sequence[TokenEvent],
        *,
        seconds: float,
        now: float,
    ) -> None:
        line: Json = {
            "step": plan.step,
            "end": now,  # exact, since pins end by it
            "seconds": round(seconds, 6),
        }
        if self._launched is not None and self._launched[0] == plan.step:
            line |= self._launched[1]
            self._launched = None
        if isinstance(result, ErrorInfo):
            line["failed"] = True  # all of them
        elif failed := [self._numbers[e.request_id] for e in events if e.error is not None]:
            line["failed"] = failed
        took = [
            [self._numbers[event.request_id], len(event.token_ids)]
            for event in events
            if len(event.token_ids) > 1
        ]
        if took:
            line["took"] = took
        self._write("step", line)
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
        self._write_launch()
        for request in self._live.values():
            self._write_end(request, None)
        self._live.clear()
        self._lines.close()

    def _write_end(self, request: Request, reason: FinishReason | None) -> None:
        self._write(
            "end",
            {
                "request": self._numbers[request.request_id],
                "reason": reason,
                "output": request.num_output_tokens,
                "blocks": self._hashes.of_blocks(request, request.num_prompt_tokens),
            },
        )

    def _write_launch(self) -> None:
        if self._launched is not None:
            step, chosen = self._launched
            self._launched = None
            self._write("launch", {"step": step, **chosen})

    def _write(self, kind: str, line: Json) -> None:
        self._write_launch()  # lines stand in the order in which things happened
        self._lines.append(json.dumps({"kind": kind, **line}, separators=(",", ":")))
