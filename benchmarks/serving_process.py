"""A `bentoml serve` of this checkout for the time of a benchmark."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

import psutil
import record
from turns import log_file

START_LIMIT_S = 300.0
STOP_LIMIT_S = 60.0


class ServingProcess:
    """Takes the CB_* settings of the environment; `settings` are put above them."""

    def __init__(self, **settings: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._log_file = log_file("serve")
        self._started = time.monotonic()
        with self._log_file.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "bentoml", "serve", ".", "--port", str(port)],
                cwd=record.ROOT,
                env={**os.environ, "BENTOML_DO_NOT_TRACK": "True", **settings},
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def wait_until_ready(self) -> float:
        """Seconds from its start."""
        while not self._is_ready():
            seconds = time.monotonic() - self._started
            if self.process.poll() is not None or seconds > START_LIMIT_S:
                sys.exit(f"error: no server; see {self._log_file.relative_to(record.ROOT)}")
            time.sleep(0.02)
        return time.monotonic() - self._started

    def worker(self, service: str) -> psutil.Process:
        """The process of one of its services."""
        (worker,) = [
            process
            for process in psutil.Process(self.process.pid).children(recursive=True)
            if f"--service-name {service}" in " ".join(process.cmdline())
        ]
        return worker

    def close(self) -> None:
        """Its own shutdown, or by force: each worker leads a process group of its own."""
        with contextlib.suppress(psutil.NoSuchProcess):
            workers = psutil.Process(self.process.pid).children(recursive=True)
            self.process.send_signal(signal.SIGTERM)
            _, alive = psutil.wait_procs([*workers, self.process], timeout=STOP_LIMIT_S)
            for process in alive:
                process.kill()
        self.process.wait()

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/readyz", timeout=5.0) as response:
                return bool(response.status == 200)
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False


@contextlib.contextmanager
def serving(**settings: str) -> Iterator[ServingProcess]:
    server = ServingProcess(**settings)
    try:
        yield server
    finally:
        server.close()
