"""What may be asked of a running engine besides steps. Engine thread, between two steps; other
threads get here through `EngineThread.call`."""

from __future__ import annotations

import logging

from cb_backend.core.explain import RequestView, explain
from cb_backend.core.policies import policy_of
from cb_backend.core.pool_resize import MemoryPolicy, resize_pool
from cb_backend.engine.engine import Engine
from cb_backend.errors import EngineDeadError, InvalidRequestError

logger = logging.getLogger(__name__)


def use_policy(engine: Engine, name: str) -> None:
    """Change the policy; what waits and runs is ordered anew. Raises ConfigError."""
    engine.assert_thread()
    engine.scheduler.roster.use(policy_of(engine.config, name))
    engine.recording.changed("policy", name)


def explain_requests(engine: Engine) -> list[RequestView]:
    """Every live request: where it stands, what it waits for, and an estimate."""
    engine.assert_thread()
    return explain(engine.scheduler, engine.rates, engine.clock())


def resize_kv_pool(engine: Engine, num_blocks: int) -> None:
    """Grow or shrink the pool. Raises InvalidRequestError below what one request may need, and
    above what the device has memory for."""
    engine.assert_thread()
    _check_memory(engine, num_blocks)
    change = resize_pool(engine.scheduler, num_blocks, fewest=_fewest(engine))
    engine.recording.changed("num_blocks", num_blocks)
    try:
        engine.executor.resize(change)
    except Exception as error:
        logger.exception("the executor did not follow a new pool size")
        raise EngineDeadError("the KV pool could not be resized, and is lost") from error
    logger.info("the KV pool now has %d blocks", num_blocks)


def mind_neighbours(engine: Engine) -> None:
    """Give memory to whoever else needs it on the device, or take it back."""
    engine.assert_thread()
    if engine.config.min_free_gib is None:
        return
    info = engine.executor.model_info
    policy = MemoryPolicy(
        min_free_bytes=int(engine.config.min_free_gib * 2**30),
        fewest=_fewest(engine),
        most=info.num_blocks,
        bytes_per_block=info.bytes_per_block,
    )
    num_blocks = engine.scheduler.blocks.pool.num_blocks
    wanted = policy.choose(num_blocks, engine.executor.free_bytes())
    if wanted != num_blocks:
        try:
            resize_kv_pool(engine, wanted)
        except InvalidRequestError as error:  # no memory to move it through
            logger.warning("the KV pool keeps its size: %s", error.message)


def _check_memory(engine: Engine, num_blocks: int) -> None:
    """Asked first: an executor that runs out of memory half-way is beyond use."""
    now, info = engine.scheduler.blocks.pool.num_blocks, engine.executor.model_info
    extra = max(num_blocks - now, 0)
    if info.device == "cpu":
        extra += min(num_blocks, now)  # the blocks that are kept go through the same memory
    wanted = extra * info.bytes_per_block
    if wanted > (free := engine.executor.free_bytes()):
        raise InvalidRequestError(
            f"num_kv_blocks of {num_blocks}, now {now}, needs {wanted / 2**30:.2f} GiB;"
            f" the device has {free / 2**30:.2f} GiB free",
            field="num_kv_blocks",
        )


def _fewest(engine: Engine) -> int:
    return engine.scheduler.blocks.blocks_for(engine.executor.model_info.max_model_len - 1)
