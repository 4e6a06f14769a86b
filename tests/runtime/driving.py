"""Drives a ModelRunner with hand-made plans: a toy scheduler that hands out blocks in turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import PreTrainedModel

from cb_backend.config import EngineConfig
from cb_backend.core.sampling_params import SamplingParams
from cb_backend.core.step_io import Admission, ScheduledRow, StepPlan, StepResult, StepRows
from cb_backend.runtime.model_runner import ModelRunner, load_model_runner

GREEDY = SamplingParams(temperature=0.0)


def load_runner(folder: Path, **changes: object) -> ModelRunner:
    """A runner on the CPU in float32, with few small blocks so that boundaries are crossed."""
    settings: dict[str, object] = {
        "model": str(folder),
        "device": "cpu",
        "dtype": "float32",
        "block_size": 4,
        "num_kv_blocks": 96,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
    }
    return load_model_runner(EngineConfig(**(settings | changes)))  # type: ignore[arg-type]


@dataclass(eq=False)
class Running:
    """One request as the toy scheduler knows it."""

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    params: SamplingParams = GREEDY
    seed: int = 0
    num_computed: int = 0
    blocks: list[int] = field(default_factory=list)
    num_tabled: int = 0  # blocks the runner already knows of

    @property
    def output(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]


class Driver:
    """Schedules everything it has in the order it came, under a token budget."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self._block_size = runner.model_info.block_size
        self._free = list(range(runner.model_info.num_blocks))
        self.live: list[Running] = []
        self._admit: list[Running] = []
        self._retire: list[str] = []
        self._step = 0

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        params: SamplingParams = GREEDY,
        seed: int = 0,
        shared: Running | None = None,
        num_shared: int = 0,
    ) -> Running:
        """A new request, the first `num_shared` tokens of which lie in another's blocks."""
        new = Running(request_id, list(prompt), len(prompt), params, seed)
        if shared is not None:
            new.num_computed = num_shared
            new.blocks = shared.blocks[: num_shared // self._block_size]
        self.live.append(new)
        self._admit.append(new)
        return new

    def remove(self, sequence: Running, keep_blocks: bool = False) -> None:
        self.live.remove(sequence)
        self._retire.append(sequence.request_id)
        if not keep_blocks:
            # To the front: the next request reuses them, with what is still in them.
            self._free[:0] = sequence.blocks

    def preempt(self, sequence: Running) -> None:
        """Out of the batch, its blocks gone; comes back with the next step."""
        self._retire.append(sequence.request_id)
        self._free[:0] = sequence.blocks
        sequence.blocks, sequence.num_tabled, sequence.num_computed = [], 0, 0
        self._admit.append(sequence)

    def step(self, budget: int = 10**9) -> StepResult:
        rows, admitted, scheduled = [], [], []
        for sequence in self.live:
            count = min(len(sequence.token_ids) - sequence.num_computed, budget)
            if count <= 0:
                continue
            budget -= count
            if sequence in self._admit:
                admitted.append(self._admission(sequence))
                self._admit.remove(sequence)
                sequence.num_tabled = 0
            rows.append(self._row(sequence, count))
            scheduled.append((sequence, count))
        plan = StepPlan(self._step, tuple(self._retire), tuple(admitted), StepRows.of(*rows))
        self._retire = []
        self._step += 1
        result = self.runner.launch(plan).result()
        for sequence, count in scheduled:
            sequence.num_computed += count
            sequence.token_ids += result.token_ids.get(sequence.request_id, ())
        return result

    def run(self, num_tokens: int, budget: int = 10**9) -> None:
        """Until every live request has that many output tokens; each leaves when it has."""
        while self.live:
            self.step(budget)
            for sequence in [s for s in self.live if len(s.output) >= num_tokens]:
                self.remove(sequence)
        self.step()  # nothing but the last retirements

    def _admission(self, sequence: Running) -> Admission:
        return Admission(
            sequence.request_id,
            tuple(sequence.token_ids),
            sequence.num_prompt_tokens,
            sequence.num_computed,
            sequence.params,
            sequence.seed,
        )

    def _row(self, sequence: Running, count: int) -> ScheduledRow:
        end = sequence.num_computed + count
        while len(sequence.blocks) * self._block_size < end:
            sequence.blocks.append(self._free.pop(0))
        new = tuple(sequence.blocks[sequence.num_tabled :])
        sequence.num_tabled = len(sequence.blocks)
        samples = end == len(sequence.token_ids)
        return ScheduledRow(sequence.request_id, sequence.num_computed, count, new, samples)


@torch.inference_mode()
def expected_tokens(model: PreTrainedModel, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Greedy continuation by transformers alone, without any cache."""
    token_ids = list(prompt)
    for _ in range(num_tokens):
        logits = model(input_ids=torch.tensor([token_ids]), use_cache=False).logits
        token_ids.append(int(logits[0, -1].argmax()))
    return token_ids[len(prompt) :]


def prompt_of(length: int, seed: int = 0, vocab_size: int = 199) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(3, vocab_size, (length,), generator=generator).tolist()
