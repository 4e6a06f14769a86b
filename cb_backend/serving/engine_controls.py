"""What an operator asks of a running engine in this process. Asyncio loop."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from cb_backend.core.explain import RequestView
from cb_backend.engine import controls
from cb_backend.engine.trace import trace_json
from cb_backend.errors import ConfigError, InvalidRequestError

if TYPE_CHECKING:
    from cb_backend.serving.async_engine import AsyncEngine


async def live_requests(engine: AsyncEngine) -> list[RequestView]:
    return await engine.call(controls.explain_requests)


async def trace(engine: AsyncEngine) -> bytes:
    # Thousands of steps: not on the loop, which is every stream's.
    return await asyncio.to_thread(trace_json, engine.step_log())


async def use_policy(engine: AsyncEngine, name: str) -> None:
    try:
        await engine.call(lambda inner: controls.use_policy(inner, name))
    except ConfigError as error:  # here the setting is a client's
        raise InvalidRequestError(error.message, field=error.field) from None


async def resize_kv_pool(engine: AsyncEngine, num_blocks: int) -> None:
    await engine.call(lambda inner: controls.resize_kv_pool(inner, num_blocks))
