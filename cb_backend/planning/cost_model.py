"""What a step takes, as a function of what is in it: fitted to recorded steps, or from a file."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import astuple, dataclass, fields
from itertools import pairwise
from pathlib import Path

import numpy as np

from cb_backend.core.recorded_step import Json
from cb_backend.core.step_io import StepPlan
from cb_backend.errors import RecordingError
from cb_backend.planning.recording import Recording

FEWEST_STEPS = 20  # to fit to
NUM_REWEIGHTINGS = 4


@dataclass(frozen=True, slots=True)
class StepWork:
    """What makes a step long; one number for each coefficient of a CostModel."""

    step: float  # 1
    tokens: float  # that go through the model
    sampling_rows: float  # whose logits are computed
    context_tokens: float  # whose K and V are read: the length of each row after the step
    attention_pairs: float  # of a query and a key

    @property
    def amounts(self) -> tuple[float, ...]:
        return astuple(self)

    @staticmethod
    def of(rows: Iterable[tuple[int, int, bool]]) -> StepWork:
        """Of each row (computed tokens before, new tokens, whether it samples)."""
        tokens = sampling_rows = context_tokens = 0
        attention_pairs = 0.0
        for num_computed, num_new, samples in rows:
            tokens += num_new
            sampling_rows += samples
            context_tokens += num_computed + num_new
            attention_pairs += num_new * (num_computed + (num_new + 1) / 2)
        return StepWork(1, tokens, sampling_rows, context_tokens, attention_pairs)

    @staticmethod
    def of_plan(plan: StepPlan) -> StepWork:
        return StepWork.of(
            zip(
                plan.rows.num_computed_tokens,
                plan.rows.num_scheduled_tokens,
                plan.rows.samples,
                strict=True,
            )
        )


FEATURES = tuple(field.name for field in fields(StepWork))


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds of a step: the sum over its work, each kind at its price. No price is negative."""

    seconds: tuple[float, ...]  # per unit of each of FEATURES
    # Ratios of steps to their prices, mean 1, in the order in which they came: a slow moment of a
    # machine is longer than a step, and what piles up in it makes the tail.
    spread: tuple[float, ...] = (1.0,)
    between_s: float = 0.0  # from a step's end to the start of the next, while there is work
    source: str = ""  # where the prices come from, for a person

    def step_seconds(self, work: StepWork) -> float:
        return float(np.dot(self.seconds, work.amounts))


def read_profile(path: Path) -> tuple[CostModel, Json]:
    """A device's prices from a JSON file, and the scheduler limits that it names.

    `{"seconds": {"step": 0.004, "tokens": 2e-5, ...}, "limits": {"num_blocks": 50000, ...}}`;
    what is left out of `seconds` costs nothing. Raises RecordingError.
    """
    try:
        profile = json.loads(path.read_text())
        prices = {name: float(price) for name, price in profile["seconds"].items()}
        limits = dict(profile.get("limits", {}))
        between_s = float(profile.get("between_s", 0.0))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RecordingError(f"{path} is no profile: {error}") from None
    if unknown := prices.keys() - set(FEATURES):
        raise RecordingError(
            f"{path} prices {', '.join(sorted(unknown))}; known are {', '.join(FEATURES)}"
        )
    if not prices or not all(math.isfinite(p) and p >= 0 for p in [*prices.values(), between_s]):
        raise RecordingError(f"{path} must price its steps, with numbers of 0 or more")
    seconds = tuple(prices.get(name, 0.0) for name in FEATURES)
    return CostModel(seconds, between_s=between_s, source=f"profile {path.name}"), limits


def fit(recording: Recording) -> CostModel:
    """Least squares over the recorded steps. Raises RecordingError if they are too few."""
    works, seconds = _recorded_steps(recording)
    if len(works) < FEWEST_STEPS:
        raise RecordingError(
            f"{len(works)} recorded steps are too few to fit a cost model to, at least"
            f" {FEWEST_STEPS} are needed; name a profile"
        )
    matrix, measured = np.array([work.amounts for work in works]), np.array(seconds)
    prices = _prices(matrix, measured)
    ratios = measured / (matrix @ prices)
    off = np.median(abs(ratios - 1))
    return CostModel(
        seconds=tuple(prices.tolist()),
        spread=tuple((ratios / ratios.mean()).tolist()),
        between_s=_median_gap(recording),
        source=f"fitted to {len(works)} steps, off by {off:.0%} at the median",
    )


def _recorded_steps(recording: Recording) -> tuple[list[StepWork], list[float]]:
    computed: dict[int, int] = {}  # tokens of each request, since a row of one token leaves it out
    works, seconds = [], []
    for step in recording.steps:
        rows = []
        for row in step.decision["rows"]:
            number, start, num_new, samples = (
                (row, computed[row], 1, 1) if isinstance(row, int) else row[:4]
            )
            rows.append((start, num_new, bool(samples)))
            computed[number] = start + num_new
        if step.failed is not None and step.seconds > 0:
            works.append(StepWork.of(rows))
            seconds.append(step.seconds)
    return works, seconds


def _prices(matrix: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Least squares where each second counts alike, of short steps or long; no price below 0.

    Steps that carry prompts are few, long, and all that a TTFT is made of.
    """
    expected = np.full(len(seconds), seconds.mean())
    for _ in range(NUM_REWEIGHTINGS):
        # By what a step should take: by what it took, the fast ones would count for more.
        weights = 1 / np.sqrt(expected)
        prices = _without_negatives(matrix * weights[:, None], seconds * weights)
        expected = np.maximum(matrix @ prices, seconds.min())
    return prices


def _without_negatives(matrix: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Least squares; a feature whose price would be negative is left out."""
    used = list(range(matrix.shape[1]))
    while True:
        scale = np.maximum(matrix[:, used].max(axis=0), 1e-30)
        found, *_ = np.linalg.lstsq(matrix[:, used] / scale, wanted, rcond=None)
        if found.min() >= 0 or len(used) == 1:
            prices = np.zeros(matrix.shape[1])
            prices[used] = np.maximum(found / scale, 0.0)
            return prices
        del used[int(found.argmin())]


def _median_gap(recording: Recording) -> float:
    """Seconds between steps that follow each other while somebody runs."""
    steps = list(recording.steps)
    gaps = [
        later.end - later.seconds - earlier.end
        for earlier, later in pairwise(steps)
        if any(isinstance(row, int) for row in later.decision["rows"])  # somebody ran on
    ]
    return max(float(np.median(gaps)), 0.0) if gaps else 0.0
