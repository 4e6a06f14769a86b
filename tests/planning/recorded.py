"""Recordings to play with: of the simulation's scenarios, and short ones by hand."""

from __future__ import annotations

import itertools
from pathlib import Path

from cb_backend.config import EngineConfig
from cb_backend.engine.engine import Engine
from cb_backend.engine.recorder import open_recorder
from tests.fakes import ShadowExecutor, make_request
from tests.simulation.world import World, draw


def record_simulation(seed: int, path: Path) -> World:
    """The simulation of a seed, played to its end and recorded."""
    world = World(draw(seed), open_recorder(str(path)))
    world.play()
    world.engine.close()
    return world


def record_two_requests(path: Path) -> None:
    ticks = itertools.count()
    engine = Engine(
        EngineConfig(model="fake"),
        ShadowExecutor(),
        clock=lambda: next(ticks) / 1000,
        recording=open_recorder(str(path)),
    )
    engine.add(make_request("a", range(9), max_tokens=4))
    engine.step()
    engine.add(make_request("b", range(9), max_tokens=2))
    while engine.has_work:
        engine.step()
    engine.close()
