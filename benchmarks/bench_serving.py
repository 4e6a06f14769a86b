"""A server under load, as its clients see it, through OpenAI's streaming completions.

    python benchmarks/bench_serving.py [--workload mixed|long|prefix|single]
        [--requests N] [--concurrency N ...] [--rate R ...] [--repeat N] [--ttft-ms MS]
        [--tpot-ms MS] [--url URL]

Starts `bentoml serve .` with the CB_* settings, or takes the server at --url, which may be any with
these routes. --concurrency: so many clients, each with one request at a time. --rate: Poisson
arrivals, so many a second. Goodput is of answers within both limits. Unless --url is given, a run
with clients has the engine without HTTP beside it, over the same requests and in turns: once with
as many under way, once with all at once. Appends a line for each run to results/serving.jsonl.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import aiohttp
import record
from bench_engine import NUM_WARM_UP, config
from serving_client import Server, closed_loop, open_loop, poisson_arrivals
from serving_process import serving
from serving_stats import Figures, Limit, figures, figures_text
from turns import OURS, Contestant, add_repeat, end_as_by_ctrl_c, ratio_text
from workload import WORKLOADS, Requests, requests_of, workload

WARM_UP_CONCURRENCY = 2  # a server may be set to refuse more, to see how it does
CONCURRENCY = (32,)
RATES = (2.0, 4.0)


@dataclass(frozen=True)
class Load:
    """One workload's requests on one server."""

    server: Server
    workload: str
    requests: Requests
    limit: Limit

    def clients(self, concurrency: int, run: int) -> Figures:
        bodies = self.server.bodies(self.requests, f"{concurrency} clients, run {run}")
        answers = asyncio.run(closed_loop(self.server, bodies, concurrency))
        return self._done(figures(answers, self.limit), concurrency=concurrency)

    def poisson(self, rate: float, run: int) -> Figures:
        """Each run has other arrivals."""
        bodies = self.server.bodies(self.requests, f"rate {rate}, run {run}")
        arrivals = poisson_arrivals(rate, len(bodies), seed=run)
        answers = asyncio.run(open_loop(self.server, bodies, arrivals))
        return self._done(figures(answers, self.limit), rate=rate)

    def _done(self, of_run: Figures, **arrivals: float) -> Figures:
        kind = " ".join(f"{name} {value:g}" for name, value in arrivals.items())
        print(f"{self.workload}, {kind}: {figures_text(of_run)}", flush=True)
        record.append(
            "serving",
            {
                "system": self.server.system,
                "model": self.server.model,
                "workload": self.workload,
                **arrivals,
                "limit": asdict(self.limit),
                **of_run,
            },
        )
        return of_run


@contextlib.contextmanager
def server_at(url: str | None) -> Iterator[Server]:
    """The one at `url`, or one of our own; warm."""
    with contextlib.ExitStack() as stack:
        if url is None:
            config()  # fills the store where it lacks the default model
            process = stack.enter_context(serving())
            print(f"ready after {process.wait_until_ready():.1f} s", flush=True)
            url = process.url
        try:
            server = asyncio.run(Server.at(url.rstrip("/")))
        except (aiohttp.ClientError, TimeoutError) as error:
            sys.exit(f"error: {url}/v1/models: {error}")
        bodies = server.bodies(workload(seed=1)[:NUM_WARM_UP], "warm up")
        answers = asyncio.run(closed_loop(server, bodies, WARM_UP_CONCURRENCY))
        if errors := {answer.error for answer in answers} - {None}:
            sys.exit(f"error: {url} fails: {errors}")
        yield server


def against_offline(load: Load, concurrency: int, repeat: int) -> None:
    """HTTP and the engine alone, never at once, and what is left of its speed behind HTTP."""
    http, seated, at_once = [], [], []
    engine = Contestant("cb_backend", OURS)
    try:
        engine.load()
        for run in range(repeat):
            options = {"workload": load.workload, "requests": len(load.requests)}
            seated.append(engine.run(**options, concurrency=concurrency)["output_tok_s"])
            at_once.append(engine.run(**options)["output_tok_s"])
            http.append(load.clients(concurrency, run)["output_tok_s"])
            print(
                f"    without HTTP {seated[-1]:.1f} output tok/s with {concurrency} under way,"
                f" {at_once[-1]:.1f} with all at once",
                flush=True,
            )
    finally:
        engine.close()
    print(
        f"HTTP/offline {ratio_text(http, seated)} with {concurrency} under way in both,"
        f" {ratio_text(http, at_once)} of all at once",
        flush=True,
    )
    record.append(
        "http_offline",
        {
            "workload": load.workload,
            "concurrency": concurrency,
            "requests": len(load.requests),
            "http": http,
            "offline": seated,
            "offline_all_at_once": at_once,
        },
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--url", help="of a running server (default: start our own)")
    parser.add_argument("--workload", choices=WORKLOADS, default="mixed", help="(default mixed)")
    parser.add_argument("--requests", type=int, help="of a run (default: the workload's own)")
    parser.add_argument("--concurrency", type=int, nargs="+", help=f"(default {CONCURRENCY[0]})")
    parser.add_argument("--rate", type=float, nargs="+", help="(default 2 and 4)")
    add_repeat(parser, 3, "runs of each")
    parser.add_argument("--ttft-ms", type=float, default=500.0, help="for goodput (default 500)")
    parser.add_argument("--tpot-ms", type=float, default=100.0, help="for goodput (default 100)")
    arguments = parser.parse_args()
    end_as_by_ctrl_c()
    nothing_asked = not arguments.concurrency and not arguments.rate
    concurrency = CONCURRENCY if nothing_asked else arguments.concurrency or ()
    rates = RATES if nothing_asked else arguments.rate or ()
    with server_at(arguments.url) as server:
        load = Load(
            server,
            arguments.workload,
            requests_of(arguments.workload, server.max_model_len, arguments.requests),
            Limit(arguments.ttft_ms, arguments.tpot_ms),
        )
        for clients in concurrency:
            if arguments.url is None:
                against_offline(load, clients, arguments.repeat)
            else:
                for run in range(arguments.repeat):
                    load.clients(clients, run)
        for rate in rates:
            for run in range(arguments.repeat):
                load.poisson(rate, run)
    print(f"appended to {(record.RESULTS / 'serving.jsonl').relative_to(record.ROOT)}")


if __name__ == "__main__":
    main()
