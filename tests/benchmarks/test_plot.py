from __future__ import annotations

from pathlib import Path
from typing import Any

from plot import curves, draw


def line(tok_s: float, day: int = 1, **fields: Any) -> dict[str, Any]:
    latencies = {name: {"p95": 2 * tok_s} for name in ("ttft_ms", "itl_ms", "tpot_ms")}
    return {
        "time": f"2026-01-0{day}T10:00:00+00:00",
        "system": "cb_backend",
        "model": "m",
        "workload": "mixed",
        "output_tok_s": tok_s,
        **latencies,
        **fields,
    }


def test_a_point_is_the_median_of_its_runs_and_points_stand_in_the_order_of_their_load() -> None:
    found = curves([line(90.0, rate=4.0), *(line(tok_s, rate=2.0) for tok_s in (10.0, 50.0, 20.0))])
    (curve,) = found["mixed"].values()
    assert [(load, point["output_tok_s"]) for load, point in curve] == [(2.0, 20.0), (4.0, 90.0)]
    assert curve[0][1]["ttft_ms"] == 40.0


def test_systems_days_and_kinds_of_arrivals_have_curves_of_their_own() -> None:
    lines = [
        line(1.0, rate=2.0),
        line(1.0, concurrency=2),
        line(1.0, day=2, rate=2.0),
        line(1.0, rate=2.0, system="vllm"),
        line(1.0, rate=2.0, workload="long"),
    ]
    found = curves(lines)
    assert len(found["mixed"]) == 4
    assert len(found["long"]) == 1


def test_a_run_without_an_answer_has_no_point_and_one_without_gaps_has_no_itl() -> None:
    assert curves([line(0.0, rate=2.0, ttft_ms={})]) == {}
    (curve,) = curves([line(1.0, rate=2.0, itl_ms={}, tpot_ms={})])["mixed"].values()
    assert set(curve[0][1]) == {"output_tok_s", "ttft_ms"}


def test_a_png_is_drawn_although_a_figure_is_missing(tmp_path: Path) -> None:
    found = curves([line(1.0, rate=2.0, itl_ms={}), line(2.0, rate=2.0, workload="long")])
    draw(found, tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
