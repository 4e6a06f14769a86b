"""The streams of a device: one that computes, one that copies in, one that copies out.

Work on one stream runs in its order; between two streams only events order it. What the host hands
over goes up from page-locked buffers in one copy, and what it reads comes down through another:
that read is the only time in a step that it waits. On a CPU all of it happens at once. Engine
thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

Work = Callable[[], object]

# Each packed array begins at a multiple of this many bytes, as vector loads want it.
_ALIGNMENT = 16
# The least bytes of a buffer that is uploaded from.
_LEAST_BUFFER = 65536


class Event(Protocol):
    """A place in a stream's order."""

    def is_past(self) -> bool:
        """Whether the stream has come here."""
        ...

    def synchronize(self) -> None:
        """The host waits until the stream has come here."""
        ...


class Stream(Protocol):
    def enqueue(self, work: Work) -> None:
        """`work` enqueues operations on tensors of the device; it is called once, maybe later."""
        ...

    def record(self) -> Event:
        """The event that all that is enqueued so far is done."""
        ...

    def wait(self, event: Event) -> None:
        """What is enqueued from now on runs after `event`."""
        ...

    def uses(self, tensor: Tensor) -> None:
        """A tensor made on another stream: its memory is not given away before this stream, as
        enqueued so far, is done with it."""
        ...


@dataclass(frozen=True, slots=True)
class Reading:
    """A tensor on its way to the host."""

    _values: Tensor
    _event: Event

    def wait(self) -> np.ndarray:
        """The tensor's numbers. The one point of a step where the host waits for the device."""
        self._event.synchronize()
        values: np.ndarray = self._values.numpy()
        return values


class Streams:
    """The three streams and the buffers, on whatever makes streams."""

    def __init__(
        self, make: Callable[[], Stream], compute: Stream, device: torch.device, *, pins: bool
    ) -> None:
        """`pins`: host memory is page-locked, without which a copy is not asynchronous."""
        self.compute = compute
        self.copy_in, self.copy_out = make(), make()
        self._device = device
        self._pins = pins
        # What is uploaded from, and the event after which it may be filled again.
        self._buffers: list[tuple[Tensor, Event]] = []

    def host_memory(self, num_bytes: int) -> Tensor:
        """Bytes that the copying streams can reach."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._pins)

    def upload(self, arrays: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
        """The arrays on the device, in one copy on the computing stream. Nobody waits."""
        starts = _starts(arrays)
        size = starts.pop("")
        pinned = self._take_buffer(size)
        host = pinned.numpy()
        for name, array in arrays.items():
            start = starts[name]
            target = host[start : start + array.nbytes].view(array.dtype)
            target.reshape(array.shape)[...] = array
        packed = torch.empty(size, dtype=torch.uint8, device=self._device)
        self.compute.enqueue(lambda: packed.copy_(pinned[:size], non_blocking=True))
        self._buffers.append((pinned, self.compute.record()))
        return {
            name: _view(packed[starts[name] : starts[name] + array.nbytes], array)
            for name, array in arrays.items()
        }

    def read(self, tensor: Tensor) -> Reading:
        """Begin to bring to the host what the computing stream will have put there."""
        size = tensor.numel() * tensor.element_size()
        pinned = self.host_memory(size)
        flat = pinned.view(tensor.dtype).view(tensor.shape)
        self.compute.enqueue(lambda: flat.copy_(tensor, non_blocking=True))
        return Reading(flat, self.compute.record())

    def synchronize(self) -> None:
        """The host waits for all that is enqueued anywhere."""
        for stream in (self.copy_in, self.copy_out, self.compute):
            stream.record().synchronize()

    def _take_buffer(self, num_bytes: int) -> Tensor:
        """One that no copy reads from any more: a new one, rather than wait for the device."""
        for i, (buffer, event) in enumerate(self._buffers):
            if buffer.numel() >= num_bytes and event.is_past():
                del self._buffers[i]
                return buffer
        return self.host_memory(max(2 * num_bytes, _LEAST_BUFFER))


class HostStreams(Streams):
    """Of a CPU: everything is done when it is asked for, and nothing is copied."""

    def __init__(self) -> None:
        at_once = _AtOnce()
        super().__init__(lambda: at_once, at_once, torch.device("cpu"), pins=False)

    def upload(self, arrays: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def read(self, tensor: Tensor) -> Reading:
        return Reading(tensor, self.compute.record())


def streams_of(device: torch.device) -> Streams:
    if device.type != "cuda":
        return HostStreams()
    compute = _CudaStream(torch.cuda.current_stream(device))
    return Streams(lambda: _CudaStream(_new_stream(device)), compute, device, pins=True)


class _AtOnce:
    """Implements `Stream` and `Event`."""

    def enqueue(self, work: Work) -> None:
        work()

    def record(self) -> Event:
        return self

    def wait(self, event: Event) -> None:
        pass

    def uses(self, tensor: Tensor) -> None:
        pass

    def is_past(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class _CudaEvent:
    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def is_past(self) -> bool:
        return bool(self.event.query())

    def synchronize(self) -> None:
        self.event.synchronize()


class _CudaStream:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def enqueue(self, work: Work) -> None:
        with torch.cuda.stream(self._stream):
            work()

    def record(self) -> Event:
        event = torch.cuda.Event()
        event.record(self._stream)
        return _CudaEvent(event)

    def wait(self, event: Event) -> None:
        assert isinstance(event, _CudaEvent)
        self._stream.wait_event(event.event)

    def uses(self, tensor: Tensor) -> None:
        tensor.record_stream(self._stream)


def _new_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _starts(arrays: Mapping[str, np.ndarray]) -> dict[str, int]:
    """Where each array begins in the packed bytes, and under "" their number."""
    starts, end = {}, 0
    for name, array in arrays.items():
        starts[name] = end
        end += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    return starts | {"": end}


def _view(data: Tensor, array: np.ndarray) -> Tensor:
    dtype: torch.dtype = torch.from_numpy(array[:0]).dtype
    return data.view(dtype).view(array.shape)
