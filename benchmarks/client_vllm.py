"""vLLM's own load generator on any server, for bench_client_vllm.py; runs in vLLM's python.

python client_vllm.py URL MODEL TOKENIZER_FOLDER    one run for each line of JSON on standard input

Its command line does not start in the CPU wheel, so its functions are called; client, clock and
statistics are vLLM's.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from transformers import AutoTokenizer
from vllm.benchmarks.datasets import SampleRequest
from vllm.benchmarks.serve import TaskType, benchmark
from workload import Requests, requests_of


async def run(
    url: str,
    model: str,
    requests: Requests,
    *,
    tokenizer: object,
    cache_salt: str,
    concurrency: int,
) -> dict[str, Any]:
    samples = [
        SampleRequest(prompt=prompt, prompt_len=len(prompt), expected_output_len=count)
        for prompt, count in requests
    ]
    return await benchmark(
        task_type=TaskType.GENERATION,
        endpoint_type="openai",
        base_url=url,
        api_url=f"{url}/v1/completions",
        model_id=model,
        model_name=model,
        tokenizer=tokenizer,  # without one it leaves out the latencies
        input_requests=samples,
        logprobs=None,
        request_rate=float("inf"),
        burstiness=1.0,
        disable_tqdm=True,
        num_warmups=0,
        profile=False,
        selected_percentile_metrics=["ttft", "tpot", "itl", "e2el"],
        selected_percentiles=[50, 95, 99],
        ignore_eos=True,
        goodput_config_dict={},
        max_concurrency=concurrency,
        lora_modules=None,
        extra_headers=None,
        extra_body={"temperature": 0.0, "cache_salt": cache_salt},
        ready_check_timeout_sec=0,  # it would send the first request once more, into the cache
    )


def figures(result: dict[str, Any]) -> dict[str, Any]:
    """By the names of serving_stats.py."""
    latencies = {
        f"{ours}_ms": {f"p{share}": result[f"p{share}_{theirs}_ms"] for share in (50, 95, 99)}
        for ours, theirs in {"ttft": "ttft", "itl": "itl", "tpot": "tpot", "e2e": "e2el"}.items()
    }
    return {
        "errors": result["failed"],
        "requests_per_s": result["request_throughput"],
        "output_tok_s": result["output_throughput"],
        "total_tok_s": result["total_token_throughput"],
        **latencies,
    }


def main(url: str, model: str, tokenizer_folder: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    print("READY", flush=True)
    for line in sys.stdin:
        options = json.loads(line)
        requests = requests_of("mixed", 0, options["requests"])
        measured = run(
            url,
            model,
            requests,
            tokenizer=tokenizer,
            cache_salt=options["cache_salt"],
            concurrency=options["concurrency"],
        )
        print("RESULT", json.dumps(figures(asyncio.run(measured))), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
