"""Fixtures of the whole suite."""

from __future__ import annotations

import os

import pytest

# Before torch is loaded: its OpenMP threads would spin while they wait for each other, and beside
# a server on the same cores that costs a hundred times what it saves.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"
