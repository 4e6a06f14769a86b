"""Streams that run what is enqueued as late and as much out of order as they may.

Between two streams only events order anything, so a wait that is missing shows as soon as the
order is drawn that it should have forbidden.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import torch
from torch import Tensor

from cb_backend.runtime.streams import Event, Streams, Work


@dataclass(eq=False)
class LateEvent:
    device: LateDevice
    past: bool = False

    def is_past(self) -> bool:
        return self.past

    def synchronize(self) -> None:
        while not self.past:
            self.device.run_one()


@dataclass(eq=False)
class LateStream:
    device: LateDevice
    queue: deque[Work | LateEvent | tuple[LateEvent]] = field(default_factory=deque)

    def enqueue(self, work: Work) -> None:
        self.queue.append(work)

    def record(self) -> Event:
        event = LateEvent(self.device)
        self.queue.append(event)
        return event

    def wait(self, event: Event) -> None:
        assert isinstance(event, LateEvent)
        self.queue.append((event,))

    def uses(self, tensor: Tensor) -> None:
        pass

    def can_run(self) -> bool:
        if not self.queue:
            return False
        first = self.queue[0]
        return first[0].past if isinstance(first, tuple) else True

    def run_one(self) -> None:
        first = self.queue.popleft()
        if isinstance(first, LateEvent):
            first.past = True
        elif not isinstance(first, tuple):
            first()


class LateDevice:
    """A device in host memory; `seed` draws the order."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.all_streams: list[LateStream] = []  # compute, copy-in, copy-out
        # One stream is much slower than the others, most of the time.
        self._slow = self._random.choice([0, 1, 2])

    def stream(self) -> LateStream:
        self.all_streams.append(LateStream(self))
        return self.all_streams[-1]

    def streams(self) -> Streams:
        return Streams(self.stream, self.stream(), torch.device("cpu"), pins=False)

    def run_one(self) -> None:
        able = [stream for stream in self.all_streams if stream.can_run()]
        assert able, "every stream waits for another"
        slow = self.all_streams[self._slow]
        if len(able) > 1 and slow in able and self._random.random() < 0.9:
            able.remove(slow)
        self._random.choice(able).run_one()

    def run_all(self) -> None:
        while any(stream.queue for stream in self.all_streams):
            self.run_one()
