"""Does a foreign client see what ours sees? vLLM's own load generator beside bench_serving's.

    python benchmarks/bench_client_vllm.py [--concurrency N] [--requests N] [--repeat N]
        [--peer-python PYTHON]

Starts `bentoml serve .`; then the two send the same requests, in turns, with so many under way.
The first run installs vLLM into .venv-vllm, as bench_peer_vllm.py does. Appends to
results/client_vllm.jsonl.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from collections.abc import Iterator, Sequence

import record
from bench_engine import config
from bench_peer_vllm import VLLM, add_peer_python, peer_python
from bench_serving import server_at
from serving_client import Server, closed_loop
from serving_stats import LATENCIES, Figures, Limit, figures
from turns import HERE, Contestant, add_repeat, end_as_by_ctrl_c, ratio_text
from workload import NUM_REQUESTS, workload

RATES = ("output_tok_s", "requests_per_s")
NO_LIMIT = Limit(ttft_ms=float("inf"), tpot_ms=float("inf"))


def take_turns(
    server: Server, client: Contestant, *, concurrency: int, num_requests: int, repeat: int
) -> tuple[list[Figures], list[Figures]]:
    ours, theirs = [], []
    for run in range(repeat):
        bodies = server.bodies(workload(num_requests=num_requests), f"ours, run {run}")
        answers = asyncio.run(closed_loop(server, bodies, concurrency))
        ours.append(figures(answers, NO_LIMIT))
        theirs.append(
            client.run(
                requests=num_requests, concurrency=concurrency, cache_salt=f"vllm's, run {run}"
            )
        )
        print(
            f"output tok/s: ours {ours[-1]['output_tok_s']:.1f}, errors"
            f" {sum(ours[-1]['errors'].values())}; vllm's {theirs[-1]['output_tok_s']:.1f}, errors"
            f" {theirs[-1]['errors']}",
            flush=True,
        )
    return ours, theirs


def columns(runs: Sequence[Figures]) -> Iterator[tuple[str, list[float]]]:
    """Each figure of all runs, percentiles one by one."""
    for name in RATES:
        yield name, [run[name] for run in runs]
    for name in LATENCIES:
        for share in runs[0][name]:
            yield f"{name} {share}", [run[name][share] for run in runs]


def show(ours: Sequence[Figures], theirs: Sequence[Figures]) -> None:
    print(f"{'median of the runs':18} {'ours':>10} {'vllm':>10}  vllm's/ours")
    for (name, of_ours), (_, of_theirs) in zip(columns(ours), columns(theirs), strict=True):
        print(
            f"{name:18} {statistics.median(of_ours):10.1f} {statistics.median(of_theirs):10.1f} "
            f" {ratio_text(of_theirs, of_ours)}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--concurrency", type=int, default=32, help="under way (default 32)")
    parser.add_argument("--requests", type=int, default=NUM_REQUESTS, help="of a run (default 64)")
    add_repeat(parser, 3, "turns")
    add_peer_python(parser)
    arguments = parser.parse_args()
    end_as_by_ctrl_c()
    python = arguments.peer_python or peer_python()
    with server_at(None) as server:
        script = str(HERE / "client_vllm.py")
        command = [str(python), script, server.url, server.model, config().model]
        client = Contestant("client-vllm", command)
        try:
            client.load()
            ours, theirs = take_turns(
                server,
                client,
                concurrency=arguments.concurrency,
                num_requests=arguments.requests,
                repeat=arguments.repeat,
            )
        finally:
            client.close()
    show(ours, theirs)
    measured = {
        "client": VLLM,
        "concurrency": arguments.concurrency,
        "requests": arguments.requests,
        "ours": ours,
        "vllm": theirs,
    }
    print(f"appended to {record.append('client_vllm', measured).relative_to(record.ROOT)}")


if __name__ == "__main__":
    main()
