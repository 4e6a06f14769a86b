"""A real `bentoml serve`, and what tests ask it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil

from cb_backend.default_model import stored

PROJECT = Path(__file__).resolve().parents[2]
BENTOML = Path(sys.executable).with_name("bentoml")
START_LIMIT_S = 120.0
EVENT_LIMIT_S = 30.0


class ServingProcess:
    def __init__(self, target: str, home: Path, *, arguments: list[str], **settings: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.log = home / "serve.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [BENTOML, "serve", target, "--port", str(self.port), *arguments],
                cwd=PROJECT,
                env=environment(home, **settings),
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self.url = f"http://127.0.0.1:{self.port}"
        self.http = httpx.Client(base_url=self.url, timeout=60.0)

    def wait_until_ready(self) -> None:
        self.wait_until(lambda: self.status_of("/readyz") == 200, START_LIMIT_S)

    def wait_until(self, condition: Callable[[], bool], limit_s: float = EVENT_LIMIT_S) -> None:
        deadline = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < deadline, self.log.read_text()[-4000:]
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            time.sleep(0.05)

    def status_of(self, path: str) -> int | None:
        """None while nothing answers."""
        try:
            return self.http.get(path, timeout=10.0).status_code
        except httpx.TransportError:
            return None

    def metric(self, name: str) -> float:
        """`name` as Prometheus writes it, labels included."""
        found = re.search(
            rf"^{re.escape(name)} (\S+)$", self.http.get("/metrics").text, re.MULTILINE
        )
        return float(found[1]) if found else 0.0

    def is_idle(self) -> bool:
        return not any(
            self.metric(name)
            for name in ("cb_requests_running", "cb_requests_waiting", "cb_kv_cache_usage_ratio")
        )

    def worker(self, service: str) -> psutil.Process:
        """A service's worker."""
        (worker,) = [
            process
            for process in psutil.Process(self.process.pid).children(recursive=True)
            if f"--service-name {service}" in " ".join(process.cmdline())
        ]
        return worker

    def terminate(self) -> int:
        """The exit status after SIGTERM."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60.0)

    def close(self) -> None:
        """Whatever state it is in. Each worker is the leader of a process group of its own."""
        self.http.close()
        with contextlib.suppress(psutil.NoSuchProcess):
            supervisor = psutil.Process(self.process.pid)
            for process in [supervisor, *supervisor.children(recursive=True)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        self.process.wait()


@contextlib.contextmanager
def serving(
    target: str, home: Path, *, arguments: list[str] | None = None, **settings: str
) -> Iterator[ServingProcess]:
    server = ServingProcess(target, home, arguments=arguments or [], **settings)
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.close()


def environment(home: Path, **settings: str) -> dict[str, str]:
    """One BENTOML_HOME for each server: two that share it wipe each other's metrics."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("CB_")}
    return inherited | {
        "BENTOML_HOME": str(home),
        "BENTOML_DO_NOT_TRACK": "true",
        "CB_KV_CACHE_GIB": "0.25",
        "CB_NUM_THREADS": "1",  # two threads that wait for each other crawl on busy cores
        **settings,
    }


def default_model() -> str:
    folder = stored()
    assert folder is not None, "the default model is not in BentoML's store; run `make model`"
    return str(folder)
