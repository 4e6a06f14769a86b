"""Steps of every kind before the first request, where kernels are compiled as they are first used.

Whoever came first would wait for that, seconds for each, and so would all that run beside. The
largest step is among them: memory that is too little for it is missed now. Engine thread, at load.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from cb_backend.core.sampling_params import SamplingParams
from cb_backend.core.step_io import (
    Admission,
    BlockCopy,
    CopyKind,
    Executor,
    ModelInfo,
    ScheduledRow,
    StepPlan,
    StepResult,
    StepRows,
)
from cb_backend.errors import ModelError

_LONGEST = 8192  # tokens of a row: keys are in parts long before, and launched apart by then

_GREEDY = SamplingParams(temperature=0.0, max_tokens=1)
_SAMPLING = (
    _GREEDY,
    SamplingParams(max_tokens=1, top_k=5, top_p=0.9, min_p=0.1),
    SamplingParams(max_tokens=1, logit_bias={0: 1.0}),
    SamplingParams(max_tokens=1, presence_penalty=0.5),
    SamplingParams(max_tokens=1, presence_penalty=0.5, logit_bias={0: 1.0}),
)


@dataclass(frozen=True, slots=True)
class _Row:
    """Computes so many tokens behind others, whose K and V are whatever lies in the blocks."""

    num_before: int
    num_new: int
    params: SamplingParams = _GREEDY
    first_block: int = 0


def warm_up(executor: Executor) -> None:
    """A chunk of a few tokens, and a token that reads what it has written.

    Raises ModelError for a model whose logits are not finite: no request could be answered.
    """
    info = executor.model_info
    num_tokens = min(8, info.max_model_len)
    rows = [_Row(0, 1)] if num_tokens == 1 else [_Row(0, num_tokens - 1), _Row(num_tokens - 1, 1)]
    for row in rows:
        result = _run(executor, info, [row])
    if result.failed:
        raise ModelError(
            f"its logits in {info.dtype} are not finite numbers: the weights are damaged, or need a"
            " dtype of greater range"
        )


def rehearse(
    executor: Executor, *, max_num_seqs: int, max_num_batched_tokens: int, num_host_blocks: int
) -> None:
    """Launch each of the steps and wait for it. What they sample means nothing."""
    info = executor.model_info
    for rows in _steps(info, max_num_seqs, max_num_batched_tokens):
        _run(executor, info, rows)
    for count in (1, 16):
        _run(executor, info, [_Row(0, 1)], list(_copies(info, count, min(count, num_host_blocks))))


def _steps(info: ModelInfo, num_seqs: int, num_tokens: int) -> Iterator[list[_Row]]:
    longest = min(info.max_model_len, _LONGEST)
    for count in _counts(min(num_tokens, num_seqs * longest)):
        yield [_Row(0, min(longest, count - start)) for start in range(0, count, longest)]
    for params in _SAMPLING:
        yield [_Row(0, 1, params)]
    for before in {1, longest - 1} if longest > 1 else ():
        for count in _counts(num_seqs):
            yield [_Row(before, 1, first_block=row) for row in range(count)]
        for count in _counts(min(num_tokens - 1, longest)):
            yield [_Row(before, 1, first_block=1), _Row(0, count)][:num_seqs]

    # Who all begin with the same blocks, of which it takes many before they are read apart.
    for count in _counts(num_seqs) if longest > 1 else ():
        yield [_Row(info.max_model_len - 1, 1)] * count


def _copies(info: ModelInfo, count: int, num_out: int) -> Iterator[BlockCopy]:
    blocks = [index % info.num_blocks for index in range(2 * count)]
    for source, target in zip(blocks[:count], blocks[count:], strict=True):
        yield BlockCopy(CopyKind.FORK, source, target)
    for block in range(num_out):
        yield BlockCopy(CopyKind.OUT, blocks[block], block)
    for block in range(num_out):
        yield BlockCopy(CopyKind.IN, block, blocks[block])


def _counts(most: int) -> list[int]:
    """Powers of two below `most`, and `most`; nothing below 1."""
    return [2**n for n in range(most.bit_length()) if 2**n < most] + [most] * (most > 0)


def _run(
    executor: Executor, info: ModelInfo, rows: Sequence[_Row], copies: Sequence[BlockCopy] = ()
) -> StepResult:
    names = [f"rehearsal-{number}" for number in range(len(rows))]
    plan = StepPlan(
        step=0,
        retired=(),
        admitted=tuple(map(_admission, names, rows)),
        rows=StepRows.of(
            *(_scheduled(info, name, row) for name, row in zip(names, rows, strict=True))
        ),
        copies=tuple(copies),
    )
    result = executor.launch(plan).result()
    executor.launch(StepPlan(0, tuple(names), ())).result()
    return result


def _admission(name: str, row: _Row) -> Admission:
    num_tokens = row.num_before + row.num_new
    return Admission(name, _zeros(num_tokens), num_tokens, row.num_before, row.params, seed=0)


@cache
def _zeros(count: int) -> tuple[int, ...]:
    return (0,) * count


def _scheduled(info: ModelInfo, name: str, row: _Row) -> ScheduledRow:
    num_blocks = -(-(row.num_before + row.num_new) // info.block_size)
    blocks = tuple((row.first_block + index) % info.num_blocks for index in range(num_blocks))
    return ScheduledRow(name, row.num_before, row.num_new, blocks, samples=True)
