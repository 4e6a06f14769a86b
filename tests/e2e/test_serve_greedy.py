"""Through the HTTP API a real model says, word for word, what transformers says."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from openai import OpenAI
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.e2e.serving_process import ServingProcess, default_model, serving

pytestmark = [pytest.mark.serve, pytest.mark.timeout(600)]

NUM_TOKENS = 24
SUBJECTS = (
    "the capital of France",
    "why the sky is blue",
    "a haiku about rain",
    "the number after 41",
    "how bread is made",
    "what a compiler does",
    "the first president of the United States",
    "the largest planet",
    "three primary colours",
    "how to greet someone in Spanish",
    "what photosynthesis is",
    "a good name for a cat",
    "the boiling point of water",
    "the author of Hamlet",
    "how many days a leap year has",
    "the opposite of cold",
    "what gravity does",
    "an example of a mammal",
    "how to boil an egg",
    "why we sleep",
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServingProcess]:
    home = tmp_path_factory.mktemp("home")
    settings = {"CB_MODEL": default_model(), "CB_DTYPE": "float32", "CB_SERVED_MODEL_NAME": "m"}
    with serving(".", home, **settings) as server:
        yield server


@pytest.fixture(scope="module")
def expected() -> list[str]:
    """transformers' own greedy answer in float32 to each prompt, alone."""
    folder = Path(default_model())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    answers = []
    for messages in map(messages_about, SUBJECTS):
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        output = model.generate(**inputs, max_new_tokens=NUM_TOKENS, do_sample=False)
        new = output[0, inputs["input_ids"].shape[1] :]
        answers.append(tokenizer.decode(new, skip_special_tokens=True))
    return answers


def messages_about(subject: str) -> list[Any]:
    return [{"role": "user", "content": f"Tell me {subject}."}]


def ask(server: ServingProcess, subject: str) -> str:
    client = OpenAI(base_url=f"{server.url}/v1", api_key="unused")
    answer = client.chat.completions.create(
        model="m", messages=messages_about(subject), temperature=0, max_tokens=NUM_TOKENS
    )
    return answer.choices[0].message.content or ""


def test_twenty_prompts_sent_alone_are_answered_as_by_transformers(
    server: ServingProcess, expected: list[str]
) -> None:
    assert [ask(server, subject) for subject in SUBJECTS] == expected
    assert len(set(expected)) == len(SUBJECTS)


def test_the_same_twenty_sent_at_once_are_answered_the_same(
    server: ServingProcess, expected: list[str]
) -> None:
    before = server.metric("cb_steps_total")
    with ThreadPoolExecutor(len(SUBJECTS)) as pool:
        assert list(pool.map(lambda subject: ask(server, subject), SUBJECTS)) == expected
    server.wait_until(server.is_idle)
    num_steps = server.metric("cb_steps_total") - before
    assert num_steps < 10 * NUM_TOKENS, "they shared their steps"
