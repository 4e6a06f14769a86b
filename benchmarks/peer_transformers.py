"""The side of transformers' continuous batching in bench_peer_transformers.py.

python peer_transformers.py MODEL_FOLDER    one run for each line of standard input
"""

from __future__ import annotations

import json
import sys
import time

import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from workload import OUTPUT_TOKENS, Requests, workload

NUM_WARM_UP = 8  # requests


def main(model_folder: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(
        model_folder, dtype=torch.bfloat16, attn_implementation="sdpa"
    ).eval()
    greedy = GenerationConfig(
        do_sample=False,
        eos_token_id=-1,  # none: every answer has its full length
        pad_token_id=model.config.pad_token_id or 0,
        max_new_tokens=OUTPUT_TOKENS[1],
    )
    with model.continuous_batching_context_manager(generation_config=greedy) as manager:

        def run(requests: Requests) -> float:
            """Output tokens per second."""
            started, num_finished, num_output = time.monotonic(), 0, 0
            for prompt, count in requests:
                manager.add_request(prompt, max_new_tokens=count)
            while num_finished < len(requests):
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    num_finished += 1
                    num_output += len(result.generated_tokens)
            assert num_output == sum(count for _, count in requests)
            return num_output / (time.monotonic() - started)

        run(workload(seed=1, num_requests=NUM_WARM_UP))
        print("READY", flush=True)
        for _ in sys.stdin:
            print("RESULT", json.dumps({"output_tok_s": run(workload())}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
