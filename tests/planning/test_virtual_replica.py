from __future__ import annotations

from pathlib import Path

import pytest

from cb_backend.errors import RecordingError
from cb_backend.planning.cost_model import CostModel
from cb_backend.planning.recording import read_recording
from cb_backend.planning.trace import Synthetic, trace_of
from cb_backend.planning.virtual_replica import VirtualReplica
from tests.planning.priced import SIMPLE, make_header, serve_priced

COST = CostModel((0.02, 0.001, 0.0005, 1e-5, 2e-6))


def test_a_request_alone_takes_what_its_steps_cost() -> None:
    trace = Synthetic(requests=1, prompt=(8, 8), output=(3, 3)).draw(4)
    (served,) = VirtualReplica(make_header(), SIMPLE, 4).run(trace.requests)
    assert served.ttft == pytest.approx(1 + 8 * 0.5)
    assert served.gaps == pytest.approx([1.5, 1.5])


def test_the_pause_between_steps_counts_while_there_is_work() -> None:
    trace = Synthetic(requests=1, prompt=(8, 8), output=(3, 3)).draw(4)
    cost = CostModel(SIMPLE.seconds, between_s=0.25)
    (served,) = VirtualReplica(make_header(), cost, 4).run(trace.requests)
    assert served.ttft == pytest.approx(5.0)
    assert served.gaps == pytest.approx([1.75, 1.75])


def test_a_shared_beginning_is_computed_once() -> None:
    trace = Synthetic(requests=2, rate=0.001, prompt=(9, 9), output=(1, 1), shared=8).draw(4)
    first, second = VirtualReplica(make_header(), SIMPLE, 4).run(trace.requests)
    assert first.ttft == pytest.approx(1 + 9 * 0.5)
    assert second.ttft == pytest.approx(1 + 1 * 0.5)


def test_steps_that_vary_vary_the_same_way_each_time() -> None:
    trace = Synthetic(requests=20, rate=5.0, prompt=(1, 20), output=(1, 9)).draw(4)
    cost = CostModel(COST.seconds, spread=(0.5, 1.5))
    runs = [VirtualReplica(make_header(), cost, 4).run(trace.requests) for _ in range(2)]
    assert runs[0] == runs[1]
    assert runs[0] != VirtualReplica(make_header(), COST, 4).run(trace.requests)


@pytest.mark.parametrize(("runs_ahead", "helps"), [(False, False), (True, False), (True, True)])
def test_the_virtual_replica_does_what_the_engine_does(
    runs_ahead: bool, helps: bool, tmp_path: Path
) -> None:
    """The same arrivals on the same clock: every token comes at the same moment."""
    drawn = Synthetic(requests=80, rate=8.0, prompt=(1, 90), output=(1, 30)).draw(4)
    times = serve_priced(drawn, COST, tmp_path / "run.jsonl", runs_ahead=runs_ahead, helps=helps)
    recording = read_recording(tmp_path / "run.jsonl")
    served = VirtualReplica(recording.header, COST, 4).run(trace_of(recording).requests)
    for number, request in enumerate(served):
        assert request.times == pytest.approx(times[f"r{number}"], abs=1e-9)


def test_a_request_that_never_fits_is_refused() -> None:
    trace = Synthetic(requests=1, prompt=(90, 90)).draw(4)
    with pytest.raises(RecordingError, match=r"cannot be served.*the pool has 4 of 4 tokens"):
        VirtualReplica(make_header(num_blocks=4), SIMPLE, 4).run(trace.requests)
