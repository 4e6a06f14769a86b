"""A step that workers compute has the bits of any other, whenever its caller joins them."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from cb_kernels import DecoderRun
from torch import Tensor

from cb_backend.runtime.models.decoder import Decoder
from tests.needs import needs_pairs
from tests.runtime.logits import packed_step
from tests.runtime.models.test_plain_decoder import PLAIN, PROMPTS, load

pytestmark = needs_pairs
NUMS_THREADS = (1, 2, 3, 7)  # more than there are cores, too


@pytest.fixture
def model(tmp_path: Path) -> Decoder:
    return load(PLAIN[0], tmp_path)


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def prepared(model: Decoder, prompts: list[list[int]], *, only_best: bool = False) -> DecoderRun:
    token_ids, _, attention = packed_step(model, prompts, block_size=16)
    wanted = torch.arange(len(token_ids))
    with torch.inference_mode():
        return model.prepare(token_ids, attention, wanted, only_best=only_best)


def expected(model: Decoder, prompts: list[list[int]]) -> Tensor:
    torch.set_num_threads(1)
    return prepared(model, prompts).result()


@pytest.mark.parametrize("prompts", [PROMPTS[:1], PROMPTS[2:4], PROMPTS], ids=len)
def test_the_caller_may_come_early_late_and_twice(model: Decoder, prompts: list[list[int]]) -> None:
    logits = expected(model, prompts)
    rng = random.Random(0)
    for num_threads in NUMS_THREADS:
        torch.set_num_threads(num_threads)
        for _ in range(12):
            only_best = rng.random() < 0.5
            run = prepared(model, prompts, only_best=only_best)
            if rng.random() < 0.8:
                run.begin()
            for _ in range(rng.randint(0, 2)):
                time.sleep(rng.choice((0, 1e-5, 1e-3)))
                run.help()
            time.sleep(rng.choice((0, 1e-5, 1e-3)))
            result = run.result()
            assert torch.equal(result, logits.argmax(-1) if only_best else logits)
            assert run.result() is result


def test_workers_alone_come_to_the_end(model: Decoder) -> None:
    """The caller is away for the whole step: what it asks for at last is there at once."""
    logits = expected(model, PROMPTS)
    torch.set_num_threads(3)
    run = prepared(model, PROMPTS, only_best=True)
    run.begin()
    deadline = time.monotonic() + 30
    while not torch.equal(run._out, logits.argmax(-1)):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    run.result()


def test_steps_of_several_threads_at_once(tmp_path: Path) -> None:
    """Each has its own model, as two engines of a process have; workers are everybody's."""
    models = [load(tiny, tmp_path / tiny.name) for tiny in (PLAIN[0], PLAIN[1], PLAIN[3])]
    logits = [expected(model, PROMPTS[:4]) for model in models]
    faults: list[str] = []

    def serve(index: int) -> None:
        torch.set_num_threads(2 + index)
        for number in range(40):
            run = prepared(models[index], PROMPTS[:4])
            run.begin()
            if number % 3:
                run.help()
            if not torch.equal(run.result(), logits[index]):
                faults.append(f"step {number} of {index}")

    threads = [threading.Thread(target=serve, args=(index,)) for index in range(len(models))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert faults == []


def test_two_steps_under_way_of_one_thread(model: Decoder) -> None:
    logits = expected(model, PROMPTS)
    torch.set_num_threads(3)
    first, second = prepared(model, PROMPTS), prepared(model, PROMPTS)
    first.begin()
    second.begin()
    assert torch.equal(second.result(), logits)
    assert torch.equal(first.result(), logits)


def test_a_run_that_nobody_wants_any_more_ends_before_its_memory_does(model: Decoder) -> None:
    logits = expected(model, PROMPTS)
    torch.set_num_threads(2)
    for _ in range(20):
        prepared(model, PROMPTS)  # not even begun
        run = prepared(model, PROMPTS)
        run.begin()
        del run
        gc.collect()
    assert torch.equal(prepared(model, PROMPTS).result(), logits)


def test_what_is_not_there_is_said_when_it_begins(model: Decoder) -> None:
    """As a step behind another knows its ids only then. Once they are right it goes on."""
    token_ids, _, attention = packed_step(model, PROMPTS, block_size=16)
    wanted = torch.arange(2)
    run = model.prepare(token_ids, attention, wanted, only_best=False)
    token_ids[3] = model.geometry.vocab_size
    with pytest.raises(IndexError, match="not there"):
        run.begin()
    with pytest.raises(IndexError, match="not there"):
        run.result()
    token_ids[3] = 5
    assert run.result().shape == (2, model.geometry.vocab_size)


def test_a_fork_has_workers_of_its_own(model: Decoder) -> None:
    """Of its parent's threads it has none but the one that forked."""
    ids = expected(model, PROMPTS).argmax(-1).tolist()
    torch.set_num_threads(3)
    assert prepared(model, PROMPTS, only_best=True).result().tolist() == ids
    run = prepared(model, PROMPTS, only_best=True)
    child = os.fork()
    if child == 0:
        try:
            run.begin()
            os._exit(0 if run.result().tolist() == ids else 1)
        finally:
            os._exit(2)
    deadline = time.monotonic() + 30
    while (done := os.waitpid(child, os.WNOHANG)) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(child, 9)
        time.sleep(0.01)
    assert os.waitstatus_to_exitcode(done[1]) == 0
    assert run.result().tolist() == ids


@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_fork_lets_go_of_its_parent_s_step(model: Decoder, num_threads: int, asks: bool) -> None:
    """Nobody computes that one in the child, whose copy of the run goes like any other object. Who
    asks for its result is told."""
    torch.set_num_threads(num_threads)
    for number in range(6):
        run = prepared(model, PROMPTS, only_best=True)
        run.begin()
        time.sleep(number * 1e-4)
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            code = 0
            if asks:
                run.help()
                try:
                    run.result()
                    code = 1
                except RuntimeError:
                    pass
            del run
            os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        run.result()
