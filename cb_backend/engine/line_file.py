"""A text file that grows by lines, buffered. Of the engine thread, but for `open_new`.

A disk that fills up must cost the recording and never the engine: after a failed write the file
is closed, the log says so once, and what comes later is dropped.
"""

from __future__ import annotations

import logging
from io import FileIO
from itertools import count
from pathlib import Path

from cb_backend.errors import ConfigError

logger = logging.getLogger(__name__)

_BUFFER_CHARS = 64 * 1024


class LineFile:
    """`append` lines, `flush` when there is time, `close` at the end."""

    def __init__(self, file: FileIO) -> None:
        self._file: FileIO | None = file
        self._buffer: list[str] = []
        self._num_buffered_chars = 0

    def append(self, line: str) -> None:
        if self._file is None:
            return
        self._buffer.append(line)
        self._num_buffered_chars += len(line)
        if self._num_buffered_chars > _BUFFER_CHARS:
            self.flush()

    def flush(self) -> None:
        if self._file is None or not self._buffer:
            return
        data = memoryview(("\n".join(self._buffer) + "\n").encode())
        self._buffer.clear()
        self._num_buffered_chars = 0
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError as error:
            logger.error("recording stops: %s cannot be written: %s", self._file.name, error)
            self.close()

    def close(self) -> None:
        """May be called again."""
        self.flush()
        if self._file is not None:
            self._file.close()
            self._file = None


def open_new(path: str) -> LineFile:
    """A new file: `path`, or where that exists `path` with a number in its name, so that no
    restart and no second worker overwrites what another has written.

    Raises ConfigError if it cannot be written.
    """
    wanted = Path(path)
    candidate = wanted
    for number in count(2):
        try:
            file = FileIO(candidate, "x")
        except FileExistsError:
            candidate = wanted.with_stem(f"{wanted.stem}-{number}")
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"record names the file {path!r}, which cannot be written"
                f" ({getattr(error, 'strerror', None) or error});"
                " name a file in a folder that exists and may be written to",
                field="record",
            ) from None
        else:
            logger.info("recording arrivals and decisions to %s", candidate)
            return LineFile(file)
    raise AssertionError("count() has no end")
