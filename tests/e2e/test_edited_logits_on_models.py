"""Penalties, biases and min_tokens through the engine: whatever happens to a request, the tokens
that transformers' logits give once they are edited as vLLM defines it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from cb_backend.core.request import FinishReason, Request
from cb_backend.core.sampling_params import SamplingParams
from cb_backend.runtime import model_runner
from cb_backend.runtime.host_logit_editor import HostLogitEditor
from cb_backend.runtime.row_edits import EditedRows
from tests.e2e.test_engine_ahead_on_models import SCHEDULES, AheadRunner, engine_of
from tests.e2e.test_engine_on_models import run
from tests.fakes import make_request
from tests.models import LLAMA
from tests.runtime.driving import GREEDY, prompt_of
from tests.runtime.edited import expected_tokens

NUM_TOKENS = 16
EOS = 2
PROMPTS = [prompt_of(length, seed=length) for length in (1, 3, 4, 9, 12, 23)]
# Each changes the output, as a test says.
PARAMS = [
    SamplingParams(temperature=0.0, repetition_penalty=1.2),
    SamplingParams(temperature=0.0, presence_penalty=1.5, frequency_penalty=0.8),
    GREEDY,
    SamplingParams(temperature=0.0, logit_bias={7: 3.0, 134: -100.0}),
    SamplingParams(temperature=0.0, frequency_penalty=-0.5, repetition_penalty=0.9),
    SamplingParams(
        temperature=0.0, presence_penalty=1.0, logit_bias={EOS: 4.0, 9: 1.0}, min_tokens=5
    ),
]


@dataclass(frozen=True)
class Case:
    model: PreTrainedModel
    folder: Path
    expected: list[list[int]]  # of PROMPTS with PARAMS


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder, model = tmp_path_factory.mktemp("model"), LLAMA.build()
    model.save_pretrained(folder)
    expected = [
        expected_tokens(model, prompt, NUM_TOKENS, params, (EOS,))
        for prompt, params in zip(PROMPTS, PARAMS, strict=True)
    ]
    return Case(model, folder, expected)


def requests() -> Iterator[Request]:
    for number, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        yield request_of(f"{number}", prompt, params)


def request_of(
    name: str, prompt: list[int], params: SamplingParams, *, fork_of: str | None = None
) -> Request:
    stop_token_ids = {*params.stop_token_ids, *(() if params.ignore_eos else (EOS,))}
    request = make_request(
        *(name, prompt), max_tokens=NUM_TOKENS, stop_token_ids=[*stop_token_ids], fork_of=fork_of
    )
    request.params = params
    return request


@pytest.fixture(params=[False, True], ids=["step by step", "ahead"])
def ahead(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether a step is always in flight, as on a GPU."""
    if request.param:
        monkeypatch.setattr(model_runner, "ModelRunner", AheadRunner)
    return bool(request.param)


def test_each_of_the_parameters_changes_the_output(case: Case) -> None:
    for prompt, params, expected in zip(PROMPTS, PARAMS, case.expected, strict=True):
        plain = expected_tokens(case.model, prompt, NUM_TOKENS, GREEDY, (EOS,))
        assert (expected != plain) == (params is not GREEDY)


@pytest.mark.parametrize(
    "settings",
    [*SCHEDULES.values(), {"max_num_seqs": 2}, {"deterministic": True}],
    ids=[*SCHEDULES, "rows reused", "alone"],
)
def test_outputs_are_the_same_however_they_are_scheduled(
    settings: dict[str, object], ahead: bool, case: Case
) -> None:
    engine = engine_of(case.folder, **settings)
    assert engine._runs_ahead == ahead
    assert run(engine, *requests()) == case.expected
    # The prefix cache is warm now, with what was generated as well: that is still no prompt.
    assert run(engine, *requests()) == case.expected
    assert (engine.stats().preemptions > 0) == ("num_kv_blocks" in settings)
    if settings.get("enable_prefix_caching", True):
        assert engine.stats().cached_tokens > 0


@torch.inference_mode()
def test_repetition_is_that_of_transformers(ahead: bool, case: Case) -> None:
    prompts = PROMPTS[1:]
    params = SamplingParams(temperature=0.0, repetition_penalty=1.2, ignore_eos=True)
    wanted = [request_of(f"{n}", prompt, params) for n, prompt in enumerate(prompts)]
    theirs = [
        case.model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            do_sample=False,
            repetition_penalty=1.2,
            max_new_tokens=NUM_TOKENS,
            eos_token_id=None,
            pad_token_id=0,
        )[0, len(prompt) :].tolist()
        for prompt in prompts
    ]
    assert run(engine_of(case.folder), *wanted) == theirs


def test_alone(ahead: bool, case: Case) -> None:
    engine = engine_of(case.folder)
    assert [run(engine, request)[0] for request in requests()] == case.expected


def test_choices_of_one_prompt_count_their_own_tokens(ahead: bool, case: Case) -> None:
    params = SamplingParams(
        temperature=0.9, frequency_penalty=1.0, presence_penalty=0.5, repetition_penalty=1.5
    )
    prompt = PROMPTS[4]
    alone = []
    for seed in (1, 2, 3):
        request = request_of("alone", prompt, params)
        request.seed = seed
        alone += run(engine_of(case.folder), request)
    first = request_of("c1", prompt, params)
    forks = [request_of(f"c{seed}", prompt, params, fork_of="c1") for seed in (2, 3)]
    for seed, request in enumerate((first, *forks), start=1):
        request.seed = seed
    assert run(engine_of(case.folder), first, *forks) == alone
    assert len(set(map(tuple, alone))) == 3


def test_who_follows_on_a_row_that_was_computed_in_vain_starts_anew(
    ahead: bool, case: Case
) -> None:
    engine = engine_of(case.folder, max_num_seqs=1)
    for number in range(len(PROMPTS)):
        request = list(requests())[number]
        stop = case.expected[number][3]
        request.stop_token_ids |= {stop}
        (output,) = run(engine, request)
        assert output == case.expected[number][: case.expected[number].index(stop) + 1]
        aborted = list(requests())[number]
        engine.add(aborted)
        for _ in range(4):
            engine.step()
        engine.abort(aborted.request_id)
        after = list(requests())[(number + 1) % len(PROMPTS)]
        assert run(engine, after) == [case.expected[(number + 1) % len(PROMPTS)]]


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_no_end_comes_before_min_tokens(ignore_eos: bool, ahead: bool, case: Case) -> None:
    params = SamplingParams(
        temperature=0.0,
        min_tokens=5,
        logit_bias={EOS: 90.0, 11: 100.0},
        stop_token_ids=(11,),
        ignore_eos=ignore_eos,
    )
    (output,) = run(engine_of(case.folder), request_of("a", PROMPTS[3], params))
    assert output == expected_tokens(case.model, PROMPTS[3], NUM_TOKENS, params, (EOS,))
    assert not {EOS, 11}.intersection(output[:5])
    assert output[5:] == [11]


def test_under_churn_a_forced_token_is_all_that_a_request_says(ahead: bool, case: Case) -> None:
    engine = engine_of(case.folder, max_num_seqs=6, max_num_batched_tokens=16)
    wanted = {f"{n}": 10 + n for n in range(40)}
    outputs: dict[str, list[int]] = {name: [] for name in wanted}
    waiting = [
        request_of(
            *(name, PROMPTS[token % len(PROMPTS)]),
            SamplingParams(temperature=1.0, logit_bias={token: 100.0}),
        )
        for name, token in wanted.items()
    ]
    for step in itertools.count():
        if step % 2 == 0 and waiting:
            engine.add(waiting.pop())
        if step % 9 == 8:
            engine.abort(f"{len(waiting) + 1}")
        if not engine.has_work and not waiting:
            break
        for event in engine.step():
            outputs[event.request_id].extend(event.token_ids)
            assert event.finish_reason is not FinishReason.ERROR
    assert all(set(output) <= {wanted[name]} for name, output in outputs.items())
    assert sum(map(len, outputs.values())) > 30 * NUM_TOKENS


def count_nothing(self: HostLogitEditor, *args: object) -> None:
    pass


def begin_with_what_is_there(self: HostLogitEditor, edits: EditedRows) -> None:
    for row in edits.first_rows.tolist():
        self._counts.setdefault(row, {})


@pytest.mark.parametrize(
    ("name", "planted"), [("count", count_nothing), ("_begin", begin_with_what_is_there)]
)
def test_a_planted_bug_of_the_counts_is_noticed(
    name: str, planted: object, ahead: bool, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HostLogitEditor, name, planted)
    assert run(engine_of(case.folder, max_num_seqs=2), *requests()) != case.expected
