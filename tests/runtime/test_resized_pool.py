"""A pool that was resized gives its memory back at once: an idle engine takes no step meanwhile."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

from cb_backend.core.step_io import PoolResize
from tests.models import TinyModel
from tests.needs import needs_pairs
from tests.runtime.driving import load_runner

SIZES = {
    "vocab_size": 208,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "head_dim": 32,
    "intermediate_size": 96,
}


@needs_pairs
def test_nothing_of_the_old_pool_is_kept(tmp_path: Path) -> None:
    TinyModel("llama", "llama", SIZES).save(tmp_path)
    runner = load_runner(tmp_path, dtype="bfloat16", block_size=16)
    assert runner._host_steps is not None, "no decoder in one call, so no test of it"
    old = weakref.ref(runner._cache.layers[0][0])
    runner.resize(PoolResize(20, (), {}))
    gc.collect()
    assert old() is None
