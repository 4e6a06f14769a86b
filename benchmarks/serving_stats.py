"""What a client saw of a run, in the field's figures. Pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import record
from serving_client import Answer

Figures = dict[str, Any]
LATENCIES = ("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms")


@dataclass(frozen=True)
class Limit:
    """What an answer must keep to count towards goodput."""

    ttft_ms: float
    tpot_ms: float

    def is_kept_by(self, answer: Answer) -> bool:
        return ttft_ms(answer) <= self.ttft_ms and (tpot_ms(answer) or 0.0) <= self.tpot_ms


def ttft_ms(answer: Answer) -> float:
    return 1e3 * (answer.chunk_times[0] - answer.due)


def tpot_ms(answer: Answer) -> float | None:
    """Time per output token after the first; a single token has none."""
    if answer.num_output_tokens < 2:
        return None
    return 1e3 * (answer.chunk_times[-1] - answer.chunk_times[0]) / (answer.num_output_tokens - 1)


def itl_ms(answer: Answer) -> list[float]:
    """Between chunks as they arrived. A chunk may carry several tokens: what is no whole
    character yet waits, and what the network delays comes together."""
    return [1e3 * (later - earlier) for earlier, later in pairwise(answer.chunk_times)]


def figures(answers: Sequence[Answer], limit: Limit) -> Figures:
    """Failed requests are counted by their error and are in no other figure; the seconds go from
    the first request that was due to the last chunk of all."""
    served = [answer for answer in answers if answer.error is None]
    errors = Counter(answer.error for answer in answers if answer.error is not None)
    last = max((answer.chunk_times[-1] for answer in served), default=float("inf"))
    seconds = last - min(answer.due for answer in answers)
    num_output = sum(answer.num_output_tokens for answer in served)
    num_prompt = sum(answer.num_prompt_tokens for answer in served)
    num_cached = sum(answer.num_cached_tokens for answer in served)
    return {
        "requests": len(answers),
        "errors": dict(errors),
        "seconds": seconds if served else None,
        "requests_per_s": len(served) / seconds,
        "output_tok_s": num_output / seconds,
        "total_tok_s": (num_output + num_prompt) / seconds,
        "cached_share": num_cached / num_prompt if num_prompt else 0.0,  # of all prompt tokens
        "goodput_requests_per_s": sum(map(limit.is_kept_by, served)) / seconds,
        "ttft_ms": record.percentiles([ttft_ms(answer) for answer in served]),
        "itl_ms": record.percentiles([gap for answer in served for gap in itl_ms(answer)]),
        "tpot_ms": record.percentiles(
            [tpot for answer in served if (tpot := tpot_ms(answer)) is not None]
        ),
        "e2e_ms": record.percentiles(
            [1e3 * (answer.chunk_times[-1] - answer.due) for answer in served]
        ),
    }


def figures_text(of_run: Figures) -> str:
    """Two lines: rates and errors, then the percentiles."""
    errors = ", ".join(f"{count} of {kind}" for kind, count in of_run["errors"].items())
    latencies = "  ".join(
        f"{name.removesuffix('_ms').upper()} "
        + "/".join(f"{value:.0f}" for value in of_run[name].values())
        for name in LATENCIES
    )
    return (
        f"{of_run['output_tok_s']:.1f} output tok/s  {of_run['total_tok_s']:.1f} total tok/s "
        f" {of_run['requests_per_s']:.2f} requests/s "
        f" goodput {of_run['goodput_requests_per_s']:.2f} requests/s "
        f" cached {of_run['cached_share']:.0%}  errors: {errors or 'none'}\n"
        f"    p50/p95/p99 ms  {latencies}"
    )
