"""Two schedules worked by hand pin both engines; changing them changes both alike.

The machine has round numbers. B = 1000 samples, one table, 10 lookups, dim 64 (256 B a row):
  lookups   L = 1000 * 10 * 256 B = 2.56 MB; channels read 4 * 16 = 64 GB/s: 40 us
  RAW       half of the lookups hit rows just written, 2x: A = 40 us * 1.5 = 60 us
  update    U = L / 4 = 0.64 MB: read 10 us, written at 4 * 1.6 = 6.4 GB/s 100 us: Up = 110 us
  row log   the same: Lg = 110 us
  transfer  R = 1000 * 64 * 4 B = 256 kB at 25.6 GB/s: X = 10 us
  MLP log   (13*64+64 + 65+1) * 4 B = 3848 B: link 0.1503 us, media 0.60125 us, streaming; the
            link's first of 16 rounds of chunks is exposed: Ml = 0.60125 + 0.1503 / 16 = 0.6106 us
  GPU       Bf = 50 us, Tt = 100 us, Bb = 30 us, given
"""

from dataclasses import replace

import pytest

from trainingcxl.sim import SYSTEMS, Hardware, Locality, load_hardware
from trainingcxl.sim.closed_form import solve
from trainingcxl.sim.event_driven import run_events
from trainingcxl.sim.schedule import Schedule
from trainingcxl.sim.systems import build_schedule
from trainingcxl.sim.workload import Model, Tables

GPU_S = {"bottom_forward": 50e-6, "top": 100e-6, "bottom_backward": 30e-6}
ML = 0.60125 + 3848 / 25.6e9 * 1e6 / 16


def round_machine() -> Hardware:
    tiny = 1e-6
    return load_hardware().with_values(
        {
            "media.pmem.read_latency_ns": tiny,
            "media.pmem.write_latency_ns": tiny,
            "media.pmem.read_gbps": 16.0,
            "media.pmem.write_gbps": 1.6,
            "media.pmem.read_after_write": 2.0,
            "expander.channels": 4,
            "expander.logic_gbps": 1e5,
            "link.bandwidth_gbps": 25.6,
            "link.flush_ns": 0.0,
        }
    )


def round_model() -> Model:
    return Model(
        name="hand",
        batch=1000,
        interaction="dot",
        source="C",
        bottom=(13, 64),
        top=(1,),
        tables=(Tables(count=1, rows=100_000, lookups=10, dim=64),),
        locality=Locality(reuse=0.5, unique_share=0.25, lookup_balance=1.0, update_balance=1.0),
    )


def schedule(system: str) -> Schedule:
    return build_schedule(SYSTEMS[system], round_machine(), round_model()).with_seconds(GPU_S)


def both(described: Schedule) -> tuple[float, float]:
    """Microseconds a batch by the closed form and by the event-driven engine."""
    closed = solve(described).seconds_per_batch
    event = run_events(described, batches=16).solution.seconds_per_batch
    return closed * 1e6, event * 1e6


HAND_WORKED = {
    # max(A, Bf) + X + Tt + X + max(Up, Bb) + Lg + Ml
    "CXL-D": 60 + 10 + 100 + 10 + 110 + 110 + ML,
    # max(A, Bf) + max(X + Tt + X, Lg + Ml) + max(Up, Bb): Lg ends at 170, just as the gradients
    # take the link until 180, and Ml has to wait for them.
    "CXL-B": 60 + (10 + 100 + 10 + ML) + 110,
    # max(Bf + Tt + Bb + 2.5 X, A without RAW + Lg + Ml / 100 + Up)
    "CXL": 40 + 110 + 110 + 0.0060125,
}


@pytest.mark.parametrize("system", HAND_WORKED)
def test_both_engines_give_the_hand_worked_time(system):
    closed, event = both(schedule(system))
    assert closed == pytest.approx(HAND_WORKED[system], rel=1e-3)
    assert event == pytest.approx(HAND_WORKED[system], rel=1e-3)


def test_gpu_bound_relaxed_schedule():
    slow = {**GPU_S, "top": 300e-6}
    described = schedule("CXL").with_seconds(slow)
    expected = 50 + 300 + 30 + 2.5 * 10
    assert both(described) == pytest.approx((expected, expected), rel=1e-3)


def test_removing_a_dependency_changes_both_engines_alike():
    # CXL-D without `top` waiting for `vectors`: nothing holds back Tt and the gradients of the next
    # batch, so they are done before its lookup; what is left is the channels' work in a row.
    described = schedule("CXL-D").without_edge("top", "vectors")
    expected = 60 + 110 + 110 + ML
    closed, event = both(described)
    assert closed == pytest.approx(expected, rel=1e-3)
    assert event == pytest.approx(expected, rel=1e-3)


def test_halving_the_channels_changes_both_engines_alike():
    # A 120, Up 220, Lg 220, Ml 1.2025 + 0.0094.
    described = schedule("CXL-D").with_speed("channel", 0.5)
    expected = 120 + 10 + 100 + 10 + 220 + 220 + ML + 0.60125
    closed, event = both(described)
    assert closed == pytest.approx(expected, rel=1e-3)
    assert event == pytest.approx(expected, rel=1e-3)


def test_halving_the_link_changes_both_engines_alike():
    described = schedule("CXL-B").with_speed("link.gpu_to_memory", 0.5)
    # The gradients take 20 us until 190; then the MLP log, its link share 0.3006 us.
    expected = 60 + (10 + 100 + 20 + ML + 3848 / 25.6e9 * 1e6 / 16) + 110
    closed, event = both(described)
    assert closed == pytest.approx(expected, rel=1e-3)
    assert event == pytest.approx(expected, rel=1e-3)


def test_lookups_more_than_one_batch_ahead_would_overstate_throughput():
    # With a slow GPU chain per batch but little load, an unbounded look-ahead changes nothing in
    # the steady state that resources do not allow: the bound of one batch is in the schedule.
    described = schedule("CXL")
    edges = {(s.name, e.step, e.batches_back) for s, e in described.edges()}
    assert ("lookup", "update", 2) in edges
    assert ("log_rows", "update", 1) in edges, "the undo log reads rows after the last update"


def test_unknown_dependency_is_refused():
    described = schedule("CXL-D")
    steps = tuple(s for s in described.steps if s.name != "vectors")
    with pytest.raises(ValueError, match="waits for unknown step 'vectors'"):
        replace(described, steps=steps)
