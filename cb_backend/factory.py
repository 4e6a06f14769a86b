"""From a config to a running engine: the one place that knows every layer."""

from __future__ import annotations

import atexit
import gc
import os
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from cb_backend.config import EngineConfig
from cb_backend.engine.engine import Engine
from cb_backend.engine.engine_thread import EngineThread
from cb_backend.engine.recorder import open_recorder
from cb_backend.engine.saved_cache import restore_cache
from cb_backend.serving.async_engine import AsyncEngine

# How often a thread of OpenMP looks for work before it sleeps: a fraction of a millisecond, which
# covers the host's work between two operators. On two quiet cores as fast as libgomp's own 300,000
# (434 to 450 against 412 to 419 output tok/s), which also spins away a busy neighbour's share of
# the cores. Read when torch is loaded; a user's own value stands.
_OPENMP_SPINS = "10000"


def create_engine(config: EngineConfig) -> AsyncEngine:
    """Start the engine's thread and return at once; the model loads in that thread.

    Until `is_ready`, requests are refused with EngineNotReadyError; a model that cannot be loaded
    leaves the engine dead, and `status_text` says why. Raises ConfigError if the file that
    `config.record` names cannot be written.
    """
    recorder = open_recorder(config.record)

    def build() -> Engine:
        if "OMP_WAIT_POLICY" not in os.environ:
            os.environ.setdefault("GOMP_SPINCOUNT", _OPENMP_SPINS)
        with _loaded_for_good():
            # Imports torch: a second that the caller's thread need not wait for.
            from cb_backend.runtime.model_runner import load_model_runner

            runner = load_model_runner(config)
        engine = Engine(config, runner, clock=time.monotonic, recording=recorder)
        restore_cache(engine)
        return engine

    thread = EngineThread(
        build, step_timeout_s=config.step_timeout_s, drain_timeout_s=config.drain_timeout_s
    )
    thread.start()
    atexit.register(_end_with_the_interpreter, weakref.ref(thread))
    return AsyncEngine(config, thread)


def _end_with_the_interpreter(reference: weakref.ref[EngineThread]) -> None:
    """For who has not closed the engine, or not waited for its end: a thread that is inside torch
    when the interpreter is gone aborts the process. What it computes is cut off after the step; a
    model that loads is waited for, and a cache that is being saved."""
    thread = reference()
    if thread is not None and not thread.life.is_dead:
        thread.close(limit_s=0.0)


@contextmanager
def _loaded_for_good() -> Iterator[None]:
    """What is made meanwhile stays, so garbage collection has no business with it: neither now (a
    fifth of the time that torch takes to import) nor later, when a full collection would go
    through all of it and stop the engine for a tenth of a second."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
        gc.unfreeze()
        gc.collect()
        gc.freeze()
    finally:
        if was_enabled:
            gc.enable()
