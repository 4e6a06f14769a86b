from __future__ import annotations

from cb_backend.planning import report
from cb_backend.planning.capacity import Prediction, Target
from cb_backend.planning.cost_model import CostModel
from cb_backend.planning.trace import Synthetic, Trace

TARGET = Target(ttft_s=0.5, itl_s=0.05)


def prediction(num_replicas: int, ttft_s: float, itl_s: float) -> Prediction:
    return Prediction(
        num_replicas, dict.fromkeys((50, 95, 99), ttft_s), dict.fromkeys((50, 95, 99), itl_s), 9, 20
    )


def test_a_trace_is_described_by_its_size_and_its_rate() -> None:
    drawn = Synthetic(requests=11, rate=1.0, prompt=(5, 5), output=(2, 2)).draw(4)
    text = report.describe_trace(Trace(drawn.requests, 4, num_left_out=3))
    assert text.startswith("trace: 11 requests in ")
    assert text.endswith("55 prompt and 22 output tokens; 3 that got no output are left out")


def test_a_cost_is_described_by_what_has_a_price() -> None:
    cost = CostModel((0.02, 0.001, 0.0, 1e-6, 0.0), between_s=0.0005, source="by hand")
    assert report.describe_cost(cost) == (
        "a step costs 2e+04 us a step + 1000 us a token + 1 us a context token,"
        " 500 us between steps (by hand)"
    )


def test_a_row_stands_under_its_headings_in_milliseconds() -> None:
    row = report.row(prediction(2, 0.25, 0.0125), TARGET)
    assert row.split() == ["2", *["250.0"] * 3, *["12.5"] * 3, "9.0", "20.0", "holds"]
    assert len(row.removesuffix("  holds")) == len(report.HEADINGS)
    assert not report.row(prediction(2, 0.75, 0.0125), TARGET).endswith("holds")


def test_the_answer_names_the_fewest_that_hold_or_what_they_miss() -> None:
    slow, fast = prediction(1, 0.6, 0.04), prediction(2, 0.4, 0.04)
    assert report.answer([slow, fast], TARGET) == f"2 replicas hold {TARGET}"
    assert report.answer([fast], TARGET) == f"2 replicas hold {TARGET}"
    assert report.answer([slow], TARGET) == (
        "up to 1 replicas do not hold p95 TTFT <= 500 ms and p95 ITL <= 50 ms; TTFT stays above"
    )
    assert "TTFT and ITL stay above" in report.answer([prediction(3, 1.0, 1.0)], TARGET)
