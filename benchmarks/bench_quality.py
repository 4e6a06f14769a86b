"""What int8 costs in quality: perplexity of one text, beside the same model as it is stored.

    python benchmarks/bench_quality.py

CPU. Takes the CB_* settings; appends to results/quality.jsonl.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # what the engine sets, see factory.py

import record
import torch
from bench_engine import config
from perplexity import WINDOW_TOKENS, WINDOWS, measured, windows_of


def main() -> None:
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args()
    settings = config()
    if settings.num_threads is not None:
        torch.set_num_threads(settings.num_threads)
    found = measured(settings, windows_of(settings.model))
    change = found["int8"] / found["none"] - 1
    print(f"perplexity by int8: {change:+.2%}, over {WINDOWS} windows of {WINDOW_TOKENS} tokens")
    name = Path(settings.model).name
    line: dict[str, object] = {"model": name, "perplexity": found, "change": change}
    print(f"appended to {record.append('quality', line).relative_to(record.ROOT)}")


if __name__ == "__main__":
    main()
