"""Our engine and transformers' own continuous batching over the shared workload, in turns.

    python benchmarks/bench_peer_transformers.py [--repeat N]

As bench_peer_vllm.py, with the transformers that is installed here. A run of theirs takes minutes.
Appends to results/peer_transformers.jsonl.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys

import record
from bench_engine import config
from turns import HERE, add_repeat, end_as_by_ctrl_c, race, ratios

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    add_repeat(parser, 2, "turns")
    arguments = parser.parse_args()
    end_as_by_ctrl_c()
    command = [sys.executable, str(HERE / "peer_transformers.py"), config().model]
    ours, theirs = race("transformers", command, arguments.repeat)
    record.append(
        "peer_transformers",
        {
            "peer": f"transformers=={importlib.metadata.version('transformers')}",
            "cb_backend": ours,
            "transformers": theirs,
            "ratio": ratios(ours, theirs),
        },
    )
