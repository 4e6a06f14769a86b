"""vLLM's side of bench_peer_vllm.py; runs in a virtual environment of its own.

python peer_vllm.py MODEL_FOLDER    one run for each line of standard input
"""

from __future__ import annotations

import json
import os
import sys
import time

# Read when vllm is imported. By default it leaves a core to the system.
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{(os.cpu_count() or 1) - 1}")
os.environ.setdefault("VLLM_CPU_NUM_OF_RESERVED_CPU", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

from vllm import LLM, SamplingParams
from workload import workload


def main(model: str) -> None:
    requests = workload()
    prompts = [{"prompt_token_ids": prompt} for prompt, _ in requests]
    params = [
        SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for _, count in requests
    ]
    llm = LLM(
        model, dtype="bfloat16", max_model_len=2048, max_num_seqs=64, enable_prefix_caching=True
    )
    llm.generate(prompts, params, use_tqdm=False)  # compiles
    print("READY", flush=True)
    for _ in sys.stdin:
        llm.reset_prefix_cache()
        started = time.monotonic()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.monotonic() - started
        num_output = sum(len(output.outputs[0].token_ids) for output in outputs)
        result = {"seconds": seconds, "output_tok_s": num_output / seconds}
        print("RESULT", json.dumps(result), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
