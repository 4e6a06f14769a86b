"""Carries the prefix cache from one run of an engine to the next. Engine thread, start and end.

A cache that cannot be read or written costs time, never the engine: it is logged and passed over.
"""

from __future__ import annotations

import logging

from cb_backend.engine.engine import Engine

logger = logging.getLogger(__name__)


def restore_cache(engine: Engine) -> None:
    """Make the saved prefixes findable, the most recently used ones if not all fit."""
    path = engine.config.cache_file
    if path is None:
        return
    digests = engine.executor.saved_digests(path)
    blocks = engine.scheduler.blocks
    first = max(len(digests) - blocks.pool.num_available, 0)
    block_ids = blocks.pool.allocate(len(digests) - first)
    try:
        engine.executor.load_blocks(path, list(enumerate(block_ids, first)))
    except Exception:
        logger.exception("the prefix cache in %s cannot be read", path)
        engine.recording.restored([], len(block_ids))
    else:
        for digest, block_id in zip(digests[first:], block_ids, strict=True):
            blocks.prefix_cache.insert(digest, block_id)
        logger.info("%d KV blocks of prefixes from %s", len(block_ids), path)
        engine.recording.restored(digests[first:], len(block_ids))
    # The last to be released is the last to be evicted.
    for block_id in block_ids:
        blocks.pool.release([block_id])


def save_cache(engine: Engine) -> None:
    """Write what the prefix cache holds, least recently used first."""
    path = engine.config.cache_file
    if path is None:
        return
    blocks = engine.scheduler.blocks
    while blocks.pins.drop_oldest():
        pass  # pinned or not, this run is over
    indexed = blocks.prefix_cache.indexed_blocks
    idle = [block_id for block_id in blocks.pool.idle_blocks if block_id in indexed]
    try:
        engine.executor.save_blocks(path, {indexed[block_id]: block_id for block_id in idle})
    except Exception:
        logger.exception("the prefix cache cannot be written to %s", path)
    else:
        logger.info("%d KV blocks of prefixes to %s", len(idle), path)
