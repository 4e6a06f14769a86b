"""What a GPU runs has been compiled before the first request, whoever comes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from cb_kernels.triton import attention_plan
from cb_kernels.triton.chips import CHIPS
from cb_kernels.triton.launch import Compilation, compile_only

from cb_backend.core.sampling_params import SamplingParams
from cb_backend.core.step_io import BlockCopy, CopyKind
from cb_backend.runtime.model_runner import ModelRunner
from cb_backend.runtime.rehearsal import rehearse, warm_up
from tests.kernels.triton.compiled.test_step import MODELS, SIZES, meta_runner
from tests.models import TinyModel
from tests.runtime.driving import Driver, prompt_of

PARAMS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.7),
    SamplingParams(top_k=3, min_p=0.1),
    SamplingParams(presence_penalty=0.5, logit_bias={1: 2.0, 3: 1.0}),
    SamplingParams(logit_bias=dict.fromkeys(range(16), 1.0)),
    SamplingParams(min_tokens=3, repetition_penalty=1.2),
)
MOST_TOKENS = 200


@pytest.fixture
def compilation(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compilation]:
    # Tiny models share too little for their prefixes to be read apart.
    monkeypatch.setattr(attention_plan, "_BYTES_OF_A_LAUNCH", 0.0)
    with compile_only(CHIPS["sm_90"]) as compilation:
        yield compilation


def _take(compilation: Compilation) -> set[tuple[str, int]]:
    """What was launched since, by kernel and by what was compiled of it."""
    found = {(one.kernel, id(one.binary)) for one in compilation.kernels}
    compilation.kernels.clear()
    return found


def _serve(runner: ModelRunner, num_steps: int) -> None:
    """Requests of all kinds come, share beginnings, are cut into chunks, and go."""
    rng, driver = random.Random(0), Driver(runner)
    for step in range(num_steps):
        if len(driver.live) < 8:
            parents = [r for r in driver.live if r.num_prompt_tokens > 32 and r.num_computed >= 32]
            rest, params = prompt_of(rng.choice([1, 7, 20, 64, 150])), rng.choice(PARAMS)
            if parents and rng.random() < 0.6:
                parent = rng.choice(parents)
                prompt = [*parent.token_ids[:32], *rest[:20]]
                driver.add(f"{step}", prompt, params, shared=parent, num_shared=32)
            else:
                driver.add(f"{step}", rest, params)
        driver.step(rng.choice([16, 40, MOST_TOKENS]))
        for request in list(driver.live):
            if len(request.output) > 10:
                driver.remove(request)
    out, fork, back = CopyKind.OUT, CopyKind.FORK, CopyKind.IN
    runner.copy_blocks([BlockCopy(out, 0, 1), BlockCopy(out, 3, 2), BlockCopy(fork, 1, 2)])
    runner.copy_blocks([BlockCopy(back, 1, 3), BlockCopy(back, 2, 4)])


@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
@pytest.mark.parametrize("tiny", MODELS, ids=str)
def test_no_request_waits_for_a_compiler(
    tiny: TinyModel,
    deterministic: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    compilation: Compilation,
) -> None:
    runner, _ = meta_runner(tiny, tmp_path, monkeypatch, deterministic=deterministic)
    warm_up(runner)
    warm = _take(compilation)
    rehearse(runner, max_num_seqs=8, max_num_batched_tokens=MOST_TOKENS, num_host_blocks=4)
    rehearsed = _take(compilation)
    _serve(runner, 80)
    served = _take(compilation)
    assert served <= rehearsed
    assert not served <= warm, "serving is no test of what is rehearsed"


def test_few_of_those_that_may_run_share_their_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compilation: Compilation
) -> None:
    tiny = TinyModel("llama", "llama", SIZES | {"num_attention_heads": 16})
    runner, _ = meta_runner(tiny, tmp_path, monkeypatch, deterministic=False)
    rehearse(runner, max_num_seqs=8, max_num_batched_tokens=MOST_TOKENS, num_host_blocks=0)
    rehearsed = _take(compilation)
    driver = Driver(runner)
    first = driver.add("first", prompt_of(130))
    driver.step()
    for number in range(7):
        prompt = [*first.token_ids[:128], number]
        driver.add(f"{number}", prompt, shared=first, num_shared=128)
        driver.step()
        assert _take(compilation) <= rehearsed, f"{number + 2} rows"
