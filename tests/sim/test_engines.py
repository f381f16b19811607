"""Closed form and event-driven engine agree; chunks are fine enough; nothing is lost."""

import time
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trainingcxl.sim import SYSTEMS, ConservationError, Locality, find_model, simulate
from trainingcxl.sim.closed_form import solve
from trainingcxl.sim.event_driven import Ledger, check_conservation, run_events
from trainingcxl.sim.systems import System, build_schedule
from trainingcxl.sim.workload import Tables

TOLERANCE = 0.02


@pytest.mark.parametrize("system", SYSTEMS)
def test_engines_agree_on_all_models(system, hardware, models):
    for model in models:
        schedule = build_schedule(SYSTEMS[system], hardware, model)
        closed = solve(schedule).seconds_per_batch
        event = run_events(schedule, batches=12).solution.seconds_per_batch
        assert event == pytest.approx(closed, rel=TOLERANCE), model.name


def log_uniform(low: float, high: float) -> st.SearchStrategy[float]:
    import math

    return st.floats(math.log(low), math.log(high)).map(lambda x: min(max(math.exp(x), low), high))


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    system=st.sampled_from(sorted(SYSTEMS)),
    name=st.sampled_from(["RM1", "RM2", "RM3", "RM4"]),
    bandwidth=log_uniform(1.0, 256.0),
    latency_ns=log_uniform(50.0, 50_000.0),
    batch=log_uniform(64, 8192),
    tables=st.integers(1, 80),
    lookups=log_uniform(1, 160),
    dim=st.integers(8, 256),
    channels=st.integers(1, 16),
    unique=log_uniform(0.05, 1.0),
    reuse=st.floats(0.0, 1.0),
    balance=st.floats(1.0, 1.5),
)
def test_engines_agree_on_random_points(
    hardware,
    system,
    name,
    bandwidth,
    latency_ns,
    batch,
    tables,
    lookups,
    dim,
    channels,
    unique,
    reuse,
    balance,
):
    model = find_model(name)
    model = replace(
        model,
        batch=int(batch),
        bottom=(*model.bottom[:-1], dim),
        tables=(Tables(count=tables, rows=1000, lookups=int(lookups), dim=dim),),
        locality=Locality(
            reuse=reuse, unique_share=unique, lookup_balance=balance, update_balance=balance
        ),
    )
    machine = hardware.with_values(
        {
            "link.bandwidth_gbps": bandwidth,
            "link.flush_ns": latency_ns,
            "expander.channels": channels,
        }
    )
    schedule = build_schedule(SYSTEMS[system], machine, model)
    closed = solve(schedule).seconds_per_batch
    batches = 12 if system == "CXL" else 4
    event = run_events(schedule, batches=batches).solution.seconds_per_batch
    assert event == pytest.approx(closed, rel=TOLERANCE)


@pytest.mark.parametrize("system", SYSTEMS)
def test_smaller_chunks_change_little(system, hardware):
    """RM2, 100 batches, within 10 s; chunks twice as many change the result by less than 0.5 %."""
    schedule = build_schedule(SYSTEMS[system], hardware, find_model("RM2"))
    started = time.process_time()
    coarse = run_events(schedule, batches=100)
    assert time.process_time() - started <= 10.0
    fine = run_events(schedule, batches=12, rounds=32)
    period = coarse.solution.seconds_per_batch
    assert fine.solution.seconds_per_batch == pytest.approx(period, rel=0.005)


def test_a_closed_form_point_takes_five_milliseconds(hardware):
    model = find_model("RM2")
    times = []
    for _ in range(9):
        started = time.process_time()
        for system in SYSTEMS.values():
            simulate(system, hardware, model)
        times.append((time.process_time() - started) / len(SYSTEMS))
    assert min(times) <= 0.005


@pytest.mark.parametrize(
    "field",
    ["near_memory", "hardware_movement", "batch_aware_log", "relaxed_lookup", "relaxed_dense_log"],
)
def test_each_idea_switched_off_gives_a_slower_or_equal_system(field, hardware, models):
    for model in models:
        full = simulate(SYSTEMS["CXL"], hardware, model).seconds_per_batch
        without = replace(SYSTEMS["CXL"], **{field: False})
        ablated = simulate(without, hardware, model).seconds_per_batch
        assert ablated >= full * (1 - 1e-9), (field, model.name)
        event = simulate(without, hardware, model, engine="event", batches=12)
        assert event.seconds_per_batch == pytest.approx(ablated, rel=TOLERANCE)


def test_breakdown_and_energy_add_up(hardware, models):
    for engine in ("closed", "event"):
        for system in SYSTEMS.values():
            result = simulate(system, hardware, models[0], engine=engine, batches=12)
            total = sum(result.breakdown_s.values())
            assert total == pytest.approx(result.seconds_per_batch, rel=1e-6)
            assert result.total_energy_j == pytest.approx(sum(result.energy_j.values()))
            assert all(0.0 <= share <= 1.0 for share in result.utilisation.values())


def test_bytes_follow_from_the_model(hardware, models):
    rm2 = models[1]
    result = simulate(SYSTEMS["CXL-D"], hardware, rm2)
    rows, distinct = rm2.lookup_bytes, rm2.update_bytes
    assert result.bytes_moved["pmem read"] == pytest.approx(rows + 2 * distinct)
    assert result.bytes_moved["pmem write"] == pytest.approx(2 * distinct + rm2.dense_bytes)
    assert result.bytes_moved["link.memory_to_gpu"] == rm2.pooled_bytes


@pytest.mark.parametrize("batches", [1, 2, 3, 4, 5, 6, 7])
def test_few_batches_never_look_faster_than_the_steady_state(batches, hardware, models):
    for model in (models[1], models[3]):
        steady = simulate(SYSTEMS["CXL"], hardware, model).seconds_per_batch
        few = simulate(SYSTEMS["CXL"], hardware, model, engine="event", batches=batches)
        assert few.seconds_per_batch >= steady * (1 - 1e-6)


def test_lost_bytes_fail_loudly():
    ledgers = {"channel": Ledger(bytes_in=100.0, bytes_out=90.0, busy_s=0.5)}
    with pytest.raises(
        ConservationError, match=r"'channel' was given 100 bytes, 100 entered and 90"
    ):
        check_conservation(ledgers, {"channel": 100.0}, 1.0)


def test_busy_beyond_time_fails_loudly():
    ledgers = {"gpu": Ledger(busy_s=1.1)}
    with pytest.raises(ConservationError, match=r"'gpu' was busy 1\.1 s of 1 server-seconds"):
        check_conservation(ledgers, {}, 1.0)


def test_demand_that_never_entered_fails_loudly():
    with pytest.raises(ConservationError, match="was given 1000 bytes, 0 entered"):
        check_conservation({"channel": Ledger()}, {"channel": 1000.0}, 1.0)


def test_busy_longer_than_the_batch_fails_loudly(hardware, models, monkeypatch):
    import sys

    module = sys.modules["trainingcxl.sim.simulate"]
    real = module.solve

    def too_short(schedule, **options):
        solution = real(schedule, **options)
        return replace(solution, seconds_per_batch=solution.seconds_per_batch / 2)

    monkeypatch.setattr(module, "solve", too_short)
    with pytest.raises(ConservationError, match="is busy"):
        simulate(SYSTEMS["CXL"], hardware, models[1])


def test_host_side_relaxation_is_allowed(hardware, models):
    system = System(name="x", medium="pmem", batch_aware_log=True, relaxed_lookup=True)
    result = simulate(system, hardware, models[0])
    plain = simulate(SYSTEMS["PMEM"], hardware, models[0])
    assert result.seconds_per_batch < plain.seconds_per_batch
