"""Whatever order a device runs its streams in, blocks and inputs arrive as if all ran at once; and
a wait that is taken away is found."""

from __future__ import annotations

import random
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from cb_backend.core.step_io import BlockCopy, CopyKind
from cb_backend.runtime.block_copier import BlockCopier
from cb_backend.runtime.kv_cache import KVCache
from cb_backend.runtime.models.interface import ModelGeometry
from cb_backend.runtime.streams import Event, HostStreams, Streams
from tests.runtime.late_streams import LateDevice, LateEvent, LateStream

GEOMETRY = ModelGeometry(
    num_layers=1, num_heads=1, num_kv_heads=1, head_dim=2, vocab_size=9, max_context=99
)
NUM_BLOCKS, NUM_HOST_BLOCKS, NUM_STEPS = 5, 3, 6


def _steps(seed: int) -> list[tuple[list[BlockCopy], int]]:
    """Copies of each step, and the block that its forward pass then writes."""
    draw = random.Random(seed)
    steps = []
    for _ in range(NUM_STEPS):
        copies = []
        for _ in range(draw.randrange(4)):
            kind = draw.choice(list(CopyKind))
            sides = {CopyKind.OUT: (NUM_BLOCKS, NUM_HOST_BLOCKS)}
            sides[CopyKind.IN] = sides[CopyKind.OUT][::-1]
            source, target = map(draw.randrange, sides.get(kind, (NUM_BLOCKS, NUM_BLOCKS)))
            copies.append(BlockCopy(kind, source, target))
        steps.append((copies, draw.randrange(NUM_BLOCKS)))
    return steps


def _run(streams: Streams, seed: int) -> tuple[Tensor, Tensor]:
    """The pool and the host tier after some steps, once all of `streams` have run."""
    cache = KVCache(GEOMETRY, NUM_BLOCKS, 1, dtype=torch.float32, device=torch.device("cpu"))
    cache.pool.copy_(torch.arange(cache.pool.numel()).view(cache.pool.shape))
    copier = BlockCopier(cache, streams, NUM_HOST_BLOCKS)
    copier._host.fill_(-1)
    for step, (copies, written) in enumerate(_steps(seed)):
        copier.run(copies)
        there = streams.upload({"block": np.array([written]), "value": np.array([1000.0 + step])})
        streams.compute.enqueue(partial(_write, cache, *there.values()))
    streams.synchronize()
    return cache.pool, copier._host


def _write(cache: KVCache, block: Tensor, value: Tensor) -> None:
    cache.pool[..., block, :, :] = value.float()


def _wrong_orders(count: int = 300) -> int:
    """How many drawn orders end in another state than running all at once."""
    wrong = 0
    for seed in range(count):
        expected = _run(HostStreams(), seed % 50)
        try:
            actual = _run(LateDevice(seed).streams(), seed % 50)
        except (IndexError, ValueError):  # what was never there was used
            wrong += 1
        else:
            wrong += any(not torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    return wrong


def test_any_order_of_the_streams_ends_in_the_same_blocks() -> None:
    assert _wrong_orders() == 0


COMPUTE, COPY_IN, COPY_OUT = range(3)


@pytest.mark.parametrize("careless", [COMPUTE, COPY_IN, COPY_OUT])
def test_a_stream_that_does_not_wait_is_found(
    careless: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait = LateStream.wait

    def planted(self: LateStream, event: Event) -> None:
        if self is not self.device.all_streams[careless]:
            wait(self, event)

    monkeypatch.setattr(LateStream, "wait", planted)
    assert _wrong_orders()


def test_a_buffer_that_is_filled_again_too_early_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LateEvent, "is_past", lambda self: True)
    assert _wrong_orders()


def test_arrays_of_any_kind_go_up_in_one_piece() -> None:
    device = LateDevice(0)
    streams = device.streams()
    arrays = {
        "ids": np.arange(7),
        "none": np.zeros(0, np.int32),
        "table": np.arange(15, dtype=np.int32).reshape(3, 5)[:, ::2],
        "shares": np.array([0.5, 1.5], np.float32),
        "one": np.array([2**62]),
    }
    there = streams.upload(arrays)
    assert len(device.all_streams[COMPUTE].queue) == 2  # a copy, and the event of its end
    for array in arrays.values():
        array[...] = 0  # the host goes on
    device.run_all()
    assert there["ids"].tolist() == [*range(7)]
    assert there["none"].shape == (0,)
    assert there["table"].tolist() == [[0, 2, 4], [5, 7, 9], [10, 12, 14]]
    assert there["shares"].tolist() == [0.5, 1.5]
    assert there["one"].item() == 2**62


def test_a_read_waits_for_what_was_computed_before() -> None:
    device = LateDevice(0)
    streams = device.streams()
    result = torch.zeros(3)
    streams.compute.enqueue(lambda: result.add_(2.0))
    assert streams.read(result).wait().tolist() == [2.0, 2.0, 2.0]


def test_copies_to_and_from_the_host_leave_the_model_alone() -> None:
    """Blocks that leave are not waited for, and blocks that come do not wait for the model."""
    device = LateDevice(0)
    streams = device.streams()
    cache = KVCache(GEOMETRY, NUM_BLOCKS, 1, dtype=torch.float32, device=torch.device("cpu"))
    copier = BlockCopier(cache, streams, NUM_HOST_BLOCKS)
    copier.run([BlockCopy(CopyKind.OUT, 0, 0)])
    assert not any(isinstance(item, tuple) for item in device.all_streams[COMPUTE].queue)
    copier.run([BlockCopy(CopyKind.IN, 1, 2)])
    assert not any(isinstance(item, tuple) for item in device.all_streams[COPY_IN].queue)
    device.run_all()
