"""How a service reaches an engine: one interface, in this process or over the runner's URL.

Runs on the asyncio loop. (LocalClient and RemoteClient stand below the interface.)
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from cb_backend.core.sampling_params import SamplingParams
from cb_backend.core.step_io import ModelInfo, TokenEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """What a service submits. `request_id` is drawn by the engine's border, never by a client."""

    prompt_token_ids: list[int]
    params: SamplingParams
    cache_salt: str = ""
    priority: int = 0


class EngineClient(Protocol):
    async def model_info(self) -> ModelInfo:
        """Raises EngineNotReadyError while the model loads, EngineDeadError once it is dead."""
        ...

    def generate(self, request: GenerateRequest) -> AsyncIterator[TokenEvent]:
        """An async generator of the request's events, the last with a finish_reason.

        Raises InvalidRequestError, OverloadedError or EngineUnavailableError before the first
        event; RequestFailedError or EngineDeadError when the stream ends with an error. Closing
        the generator early aborts the request: its blocks are free within one step.
        """
        ...

    async def close(self) -> None: ...
