"""A step whose rows go on decoding takes most of its arrays from the step before: they are those
that the long way gives, whatever has happened in between."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest

from cb_backend.core.sampling_params import SamplingParams
from cb_backend.core.step_io import Admission, ScheduledRow, StepPlan, StepRows
from cb_backend.errors import InternalError
from cb_backend.runtime.step_inputs import StepInputs
from cb_backend.runtime.token_batch import TokenBatch

BLOCK_SIZE, ROWS = 4, 6


class Pair:
    """The same plans, for a batch as it is and for one that always goes the long way."""

    def __init__(self) -> None:
        sizes = {"max_num_seqs": ROWS, "max_model_len": 64, "block_size": BLOCK_SIZE}
        self.quick = TokenBatch(**sizes, vocab_size=50, eos_token_ids=(3,))
        self.slow = TokenBatch(**sizes, vocab_size=50, eos_token_ids=(3,))
        self.num_quick = 0

    def apply(self, plan: StepPlan) -> StepInputs:
        self.slow._decoding = None
        before = self.quick._decoding
        quick, slow = self.quick.apply(plan), self.slow.apply(plan)
        if before is not None and quick.query_start_loc is before.inputs.query_start_loc:
            self.num_quick += 1
        for field in dataclasses.fields(StepInputs):
            assert same(known(quick, field.name), known(slow, field.name)), (
                f"{field.name} in {plan}"
            )
        return quick

    def raises(self, plan: StepPlan) -> None:
        self.slow._decoding = None
        texts = []
        for batch in (self.quick, self.slow):
            with pytest.raises(InternalError) as caught:
                batch.apply(plan)
            texts.append(str(caught.value))
        assert texts[0] == texts[1]


def known(inputs: StepInputs, name: str) -> object:
    value = getattr(inputs, name)
    if name == "token_ids":  # those that were sampled are left open
        value = value.copy()
        value[inputs.sampled_tokens] = -1
    return value


def same(one: object, other: object) -> bool:
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if dataclasses.is_dataclass(one):
        fields = dataclasses.fields(one)
        return all(same(getattr(one, f.name), getattr(other, f.name)) for f in fields)
    return one == other


class Scheduling:
    """Makes plans as the scheduler may: rows come, go, change places, and mostly decode."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.lengths: dict[str, list[int]] = {}  # computed, known, blocks
        self.next_block = self.next_name = 0

    def plan(self) -> StepPlan:
        rng, retired, admitted = self.rng, [], []
        changes = rng.random() < 0.2
        for name in list(self.lengths):
            if self.lengths[name][1] > 60 or (changes and rng.random() < 0.3):
                del self.lengths[name]
                retired.append(name)
        if (changes or not self.lengths) and len(self.lengths) < ROWS:
            name = f"r{self.next_name}"
            self.next_name += 1
            tokens = tuple(rng.randrange(50) for _ in range(rng.randint(1, 9)))
            biased = SamplingParams(temperature=rng.choice([0.0, 0.5]), logit_bias={1: 2.0})
            params = rng.choice([SamplingParams(temperature=0.0), SamplingParams(), biased])
            admitted.append(Admission(name, tokens, len(tokens), 0, params, rng.randrange(2**40)))
            self.lengths[name] = [0, len(tokens), 0]
        names = list(self.lengths)
        if rng.random() < 0.1:
            rng.shuffle(names)
        if rng.random() < 0.1:
            names = names[: rng.randint(1, len(names))]
            names += [one.request_id for one in admitted if one.request_id not in names]
        rows = [self._row(name) for name in names]
        return StepPlan(0, tuple(retired), tuple(admitted), StepRows.of(*rows))

    def _row(self, name: str) -> ScheduledRow:
        computed, num_known, num_blocks = self.lengths[name]
        count = self.rng.randint(1, num_known - computed)
        missing = -(-(computed + count) // BLOCK_SIZE) - num_blocks
        missing += self.rng.random() < 0.05  # a block ahead of its time
        new = tuple(range(self.next_block, self.next_block + max(missing, 0)))
        self.next_block += len(new)
        samples = computed + count == num_known
        self.lengths[name] = [computed + count, num_known + samples, num_blocks + len(new)]
        return ScheduledRow(name, computed, count, new, samples)


@pytest.mark.parametrize("seed", range(20))
def test_a_step_that_decodes_on_is_as_the_long_way_has_it(seed: int) -> None:
    pair, rng = Pair(), random.Random(seed)
    scheduling = Scheduling(rng)
    for _ in range(300):
        pair.apply(scheduling.plan())
        if rng.random() < 0.05:
            moved = {0: 90, 3: 91}
            pair.quick.rename_blocks(moved)
            pair.slow.rename_blocks(moved)
    assert pair.num_quick > 50


def decoding(computed: int, new: tuple[int, ...] = ()) -> StepPlan:
    return StepPlan(0, (), (), StepRows.of(ScheduledRow("a", computed, 1, new, True)))


def test_a_plan_that_does_not_fit_is_refused_and_nothing_of_it_is_kept() -> None:
    pair = Pair()
    admission = Admission("a", (1, 2, 3), 3, 0, SamplingParams(), 0)
    first = StepRows.of(ScheduledRow("a", 0, 3, (7,), True))
    pair.apply(StepPlan(0, (), (admission,), first))
    pair.apply(decoding(3))
    pair.raises(decoding(4))  # no block for it
    pair.apply(decoding(4, (8,)))
    pair.raises(decoding(4))  # once more
    pair.raises(decoding(6))  # one is left out
    pair.apply(decoding(5))
    pair.raises(decoding(6, tuple(range(20, 40))))  # more blocks than a row has
    pair.apply(decoding(6))
    pair.apply(decoding(7))
    assert pair.num_quick == 1
