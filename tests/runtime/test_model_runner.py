"""Every model, whichever way it is scheduled, says what transformers says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from cb_backend.config import EngineConfig
from cb_backend.core.sampling_params import SamplingParams
from cb_backend.core.step_io import PoolResize, StepPlan
from cb_backend.errors import ConfigError, InternalError, ModelError
from cb_backend.runtime import model_runner
from cb_backend.runtime.model_runner import ModelRunner
from cb_backend.runtime.models.loader import load_model
from tests.models import FALLBACK, LLAMA, NATIVE, TinyModel
from tests.runtime.driving import Driver, expected_tokens, load_runner, prompt_of
from tests.runtime.logits import packed_logits

# One token, one block less one, one block, one more, and past the windows.
PROMPTS = [prompt_of(length, seed=length) for length in (1, 3, 4, 5, 23)]
NUM_TOKENS = 6


@dataclass(frozen=True)
class Case:
    model: PreTrainedModel
    folder: Path
    expected: list[list[int]]  # of PROMPTS

    def runner(self, **changes: object) -> ModelRunner:
        return load_runner(self.folder, **changes)


@pytest.fixture(params=NATIVE + FALLBACK, ids=str, scope="module")
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return _case(request.param, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return _case(LLAMA, tmp_path_factory.mktemp("llama"))


@pytest.fixture
def llama_runner(llama: Case) -> Iterator[ModelRunner]:
    runner = llama.runner()
    yield runner
    runner.close()


def _case(tiny: TinyModel, folder: Path) -> Case:
    model = tiny.build()
    model.save_pretrained(folder)
    return Case(model, folder, [expected_tokens(model, prompt, NUM_TOKENS) for prompt in PROMPTS])


def test_packed_rows_have_the_logits_of_transformers(case: Case) -> None:
    config = EngineConfig(model=str(case.folder), dtype="float32", device="cpu")
    model, _ = load_model(config, torch.device("cpu"))
    for prompt, logits in zip(PROMPTS, packed_logits(model, PROMPTS), strict=True):
        with torch.inference_mode():
            expected = case.model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0]
        torch.testing.assert_close(logits.float(), expected, atol=1e-4, rtol=1e-4)


def test_greedy_tokens_are_the_same_alone_batched_chunked_and_resumed(case: Case) -> None:
    runner = case.runner()
    _check_alone(runner, case)
    for budget in (10**9, 7, 3):
        _check_batched(runner, case, budget)
    _check_preempted(runner, case)
    _check_shared_prefix(runner, case)
    runner.close()


def _check_alone(runner: ModelRunner, case: Case) -> None:
    driver = Driver(runner)
    alone = driver.add("alone", PROMPTS[-1])
    driver.run(NUM_TOKENS)
    assert alone.output == case.expected[-1]


def _check_batched(runner: ModelRunner, case: Case, budget: int) -> None:
    driver = Driver(runner)
    requests = [driver.add(f"{budget}-{i}", prompt) for i, prompt in enumerate(PROMPTS)]
    driver.run(NUM_TOKENS, budget)
    assert [request.output for request in requests] == case.expected, f"budget {budget}"


def _check_preempted(runner: ModelRunner, case: Case) -> None:
    driver = Driver(runner)
    requests = [driver.add(f"preempted-{i}", prompt) for i, prompt in enumerate(PROMPTS)]
    driver.step()
    driver.step()
    for request in requests[1:4]:
        driver.preempt(request)
    driver.run(NUM_TOKENS)
    assert [request.output for request in requests] == case.expected


def _check_shared_prefix(runner: ModelRunner, case: Case) -> None:
    driver = Driver(runner)
    first = driver.add("first", PROMPTS[-1])
    driver.run(NUM_TOKENS)
    second = driver.add("second", PROMPTS[-1], shared=first, num_shared=20)
    driver._free = driver._free[len(first.blocks) :]  # the shared blocks stay theirs
    driver.run(NUM_TOKENS)
    assert second.output == case.expected[-1]


def test_the_native_decoder_serves_its_families_and_transformers_the_others(
    llama: Case, tmp_path: Path
) -> None:
    assert llama.runner().model_info.implementation == "native"
    info = llama.runner(implementation="transformers").model_info
    assert info.implementation == "transformers"
    other = FALLBACK[0].save(tmp_path)
    assert load_runner(other).model_info.implementation == "transformers"


def test_both_implementations_agree_on_a_native_family(llama: Case) -> None:
    runner = llama.runner(implementation="transformers")
    _check_batched(runner, llama, 7)


def test_seeded_samples_are_the_same_alone_batched_and_preempted(llama_runner: ModelRunner) -> None:
    params = SamplingParams(temperature=0.9, top_p=0.95, top_k=50)
    alone = []
    for i, prompt in enumerate(PROMPTS):
        driver = Driver(llama_runner)
        alone.append(driver.add("alone", prompt, params, seed=i))
        driver.run(NUM_TOKENS)
    driver = Driver(llama_runner)
    batched = [driver.add(f"b{i}", p, params, seed=i) for i, p in enumerate(PROMPTS)]
    driver.add("greedy", PROMPTS[2])
    driver.step(30)
    driver.preempt(batched[1])
    driver.run(NUM_TOKENS, 30)
    assert [request.output for request in batched] == [request.output for request in alone]
    assert len({tuple(request.output) for request in alone}) == len(alone)


def test_a_row_of_nan_fails_alone_and_leaves_nothing_in_its_blocks(llama: Case) -> None:
    poison, runner = 7, llama.runner()
    prompts = [[t for t in prompt if t != poison] or [8] for prompt in PROMPTS]
    expected = [expected_tokens(llama.model, prompt, NUM_TOKENS) for prompt in prompts]
    driver = Driver(runner)
    driver.add("warm", prompts[0])
    embedding = runner._model.embedding.weight  # type: ignore[attr-defined]
    with torch.inference_mode():
        embedding[poison] = float("nan")
    bad = driver.add("bad", [3, poison, 4, 5, 6, 8, 9])
    result = driver.step()
    assert set(result.failed) == {"bad"}
    assert result.failed["bad"].code == "request_failed"
    assert "warm" in result.token_ids
    driver.remove(bad)
    driver.live.clear()
    driver._retire.append("warm")
    after = [driver.add(f"after-{i}", prompt) for i, prompt in enumerate(prompts)]
    driver.run(NUM_TOKENS)
    assert [request.output for request in after] == expected


def test_a_request_may_be_admitted_again_and_unknown_ones_retired(
    llama: Case, llama_runner: ModelRunner
) -> None:
    driver = Driver(llama_runner)
    request = driver.add("again", PROMPTS[-1])
    driver.step(5)
    # As after a failed step: the scheduler starts over, the batch still has the row.
    request.num_computed, request.blocks = 0, []
    driver._admit.append(request)
    driver._retire.append("never seen")
    driver.run(NUM_TOKENS)
    assert request.output == llama.expected[-1]


def test_an_empty_plan_only_retires(llama_runner: ModelRunner) -> None:
    driver = Driver(llama_runner)
    driver.add("gone", PROMPTS[1])
    driver.step()
    result = llama_runner.launch(StepPlan(9, ("gone",), ())).result()
    assert (result.token_ids, result.failed) == ({}, {})
    with pytest.raises(InternalError, match="never admitted"):
        driver.step()


def test_a_chunk_in_the_middle_of_a_prompt_gives_no_token(llama_runner: ModelRunner) -> None:
    driver = Driver(llama_runner)
    driver.add("long", PROMPTS[-1])
    assert driver.step(5).token_ids == {}


def test_eos_ids_come_from_the_generation_config_else_from_the_config(
    llama: Case, tmp_path: Path
) -> None:
    assert llama.runner().model_info.eos_token_ids == (2,)
    folder = LLAMA.save(tmp_path)
    (folder / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    assert load_runner(folder).model_info.eos_token_ids == (5, 6)


def test_the_context_is_the_least_of_model_config_and_pool(llama: Case) -> None:
    assert llama.runner().model_info.max_model_len == 256
    assert llama.runner(max_model_len=99).model_info.max_model_len == 99
    assert llama.runner(num_kv_blocks=5).model_info.max_model_len == 20
    with pytest.raises(ConfigError, match=r"257.*256"):
        llama.runner(max_model_len=257)
    with pytest.raises(ConfigError, match=r"max_model_len 100 needs 25 KV blocks.*24 fit"):
        llama.runner(max_model_len=100, num_kv_blocks=24)


def test_a_cache_in_float8_is_refused_where_there_are_no_kernels_for_it(llama: Case) -> None:
    with pytest.raises(ConfigError, match=r"fp8 needs .* and the device is cpu") as caught:
        llama.runner(kv_cache_dtype="fp8")
    assert caught.value.field == "kv_cache_dtype"


def test_bfloat16_follows_float32_closely(llama: Case) -> None:
    config = EngineConfig(model=str(llama.folder), dtype="bfloat16", device="cpu")
    model, _ = load_model(config, torch.device("cpu"))
    with torch.inference_mode():
        expected = llama.model(input_ids=torch.tensor([PROMPTS[-1]]), use_cache=False).logits[0]
    logits = packed_logits(model, PROMPTS)[-1].float()
    assert (logits - expected).norm() / expected.norm() < 0.05


def test_weights_that_are_no_numbers_are_found_before_the_first_request(tmp_path: Path) -> None:
    model = LLAMA.build()
    model.model.norm.weight.data.fill_(float("nan"))
    model.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="not finite"):
        load_runner(tmp_path)


def test_idle_time_goes_into_the_pool_unless_it_would_take_half_of_what_is_free(
    llama: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = llama.runner(num_kv_blocks=20_000)
    info = runner.model_info
    pool = info.num_blocks * info.bytes_per_block
    monkeypatch.setattr(model_runner, "available_bytes", lambda *_, **__: 2 * pool - 1)
    assert not runner.use_idle_time()
    monkeypatch.setattr(model_runner, "available_bytes", lambda *_, **__: 2 * pool)
    num_pieces = 0
    while runner.use_idle_time():
        num_pieces += 1
    assert num_pieces == -(-pool // 2**20) > 1
    runner.resize(PoolResize(10_000, (), {}))
    runner._min_free_bytes = pool + 1
    assert not runner.use_idle_time()
    runner._min_free_bytes = pool
    assert runner.use_idle_time()

    def does_not_tell(*_: object, **__: object) -> int:
        raise ConfigError("cannot tell")

    monkeypatch.setattr(model_runner, "available_bytes", does_not_tell)
    assert not runner.use_idle_time()
    runner.close()
