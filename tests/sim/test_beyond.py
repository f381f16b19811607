"""Beyond the paper: pools behind switches, failures, cost and endurance, measured profiles."""

import json
import time
from dataclasses import replace

import numpy as np
import pytest

from trainingcxl.sim import SYSTEMS, ParameterError, simulate
from trainingcxl.sim.closed_form import solve
from trainingcxl.sim.event_driven import run_events
from trainingcxl.sim.failures import medium_costs, recover, snapshot_goodput
from trainingcxl.sim.pool_scale import (
    DEVICES_MAX,
    Fabric,
    pool_point,
    pool_schedule,
    pool_schedule_explicit,
    pool_sweep,
)
from trainingcxl.sim.profile import order_violations, project, read_profile


def fabric(devices=1, gpus=1) -> Fabric:
    return Fabric(devices=devices, gpus=gpus, radix=32, uplinks=4, switch_gbps=800.0)


@pytest.mark.parametrize(
    ("devices", "gpus", "rounds"), [(1, 1, 16), (1, 8, 16), (16, 1, 16), (16, 8, 8), (256, 1, 4)]
)
def test_pool_engines_agree(devices, gpus, rounds, hardware, models):
    for model in (models[1], models[3]) if devices < 256 else (models[1],):
        pool = fabric(devices, gpus)
        closed = solve(pool_schedule(pool, hardware, model)).seconds_per_batch
        explicit = pool_schedule_explicit(pool, hardware, model)
        batches = 5 if devices > 16 else 8
        event = run_events(explicit, batches=batches, rounds=rounds).solution.seconds_per_batch
        assert event == pytest.approx(closed, rel=0.02), model.name


def test_one_device_behind_one_switch_is_the_paper_system(hardware, models):
    point = pool_point(fabric(), hardware, models[1])
    plain = simulate(SYSTEMS["CXL"], hardware, models[1])
    assert point.seconds_per_batch == pytest.approx(plain.seconds_per_batch, rel=0.01)
    assert point.limit == "channel"


def test_pool_of_all_4095_devices_and_its_limit(hardware, models):
    started = time.process_time()
    points = pool_sweep(fabric(gpus=8), hardware, models[1], [1, 40, 1280, DEVICES_MAX])
    assert (time.process_time() - started) * DEVICES_MAX / 4 < 60
    assert points[0].limit == "channel"
    assert points[-1].limit != "channel", "the GPUs' side saturates, not the memory"
    assert points[-1].utilisation["GPU link up"] > points[1].utilisation["GPU link up"]


@pytest.mark.parametrize(
    ("field", "value"),
    [("devices", 0), ("devices", 4096), ("gpus", 0), ("radix", 1), ("switch_gbps", 0.0)],
)
def test_bad_fabric(field, value):
    good = fabric()
    with pytest.raises(ParameterError, match=f"fabric.{field}"):
        replace(good, **{field: value})


def test_pool_too_small_for_the_model(hardware, models):
    small = hardware.with_values({"media.pmem.module_gb": 0.5})
    with pytest.raises(ParameterError, match="add devices"):
        pool_point(fabric(2), small, models[1])


def test_goodput_against_a_monte_carlo(hardware, models):
    """Failures drawn at random, batch by batch, give the goodput of the formula."""
    result = simulate(SYSTEMS["CXL-B"], hardware, models[1])
    mtbf, restart = 30.0, 5.0
    found = recover(SYSTEMS["CXL-B"], hardware, models[1], result, mtbf_s=mtbf, restart_s=restart)
    rng = np.random.default_rng(3)
    up = rng.exponential(mtbf, 200_000)
    # Half a batch is lost on average when a failure hits in the middle, the formula counts a whole.
    kept = np.floor(up / result.seconds_per_batch) * result.seconds_per_batch
    share = kept.sum() / (up.sum() + up.size * found.recovery_s)
    assert found.goodput == pytest.approx(share, rel=0.01)


def test_goodput_grows_with_the_time_between_failures(hardware, models):
    for name in ("PMEM", "DRAM", "CXL"):
        result = simulate(SYSTEMS[name], hardware, models[1])
        curve = [
            recover(SYSTEMS[name], hardware, models[1], result, mtbf_s=3600.0 * h).goodput
            for h in (0.1, 1, 10, 100)
        ]
        assert curve == sorted(curve)
        assert 0 < curve[0] < curve[-1] < 1


def test_recovery_reads_tables_only_where_memory_forgets(hardware, models):
    times = {}
    for name in ("DRAM", "CXL"):
        result = simulate(SYSTEMS[name], hardware, models[1])
        times[name] = recover(
            SYSTEMS[name], hardware, models[1], result, mtbf_s=3600.0, restart_s=0.0
        ).recovery_s
    assert times["DRAM"] == pytest.approx(models[1].table_bytes / 3.5e9, rel=0.01)
    assert times["CXL"] < 0.1


def test_snapshots_lose_more_than_a_log_when_failures_are_frequent(hardware, models):
    bare = simulate(replace(SYSTEMS["CXL"], has_checkpoint=False), hardware, models[1])
    logged = simulate(SYSTEMS["CXL"], hardware, models[1])
    often = snapshot_goodput(hardware, models[1], bare, mtbf_s=600.0)
    log = recover(SYSTEMS["CXL"], hardware, models[1], logged, mtbf_s=600.0)
    assert often.goodput < log.goodput


def test_bad_time_between_failures(hardware, models):
    result = simulate(SYSTEMS["CXL"], hardware, models[0])
    for mtbf in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ParameterError, match="mtbf"):
            recover(SYSTEMS["CXL"], hardware, models[0], result, mtbf_s=mtbf)


def test_endurance_is_bytes_written_over_rated_writes(hardware, models):
    result = simulate(SYSTEMS["CXL"], hardware, models[1])
    costs = medium_costs(SYSTEMS["CXL"], hardware, models[1], result)
    written = result.bytes_moved["pmem write"] / result.seconds_per_batch
    assert costs.written_gb_per_day == pytest.approx(written * 86400 / 1e9)
    rated = hardware.economics["pmem"].rated_writes * costs.capacity_gb
    assert costs.lifetime_years == pytest.approx(rated / costs.written_gb_per_day / 365.25)


ORDERED = [
    ("lookup", 0.0, 2.0),
    ("log_rows", 2.0, 4.0),
    ("dense", 2.0, 8.0),
    ("update", 8.0, 10.0),
]


def profile_file(tmp_path, order=ORDERED, **changes):
    tree = {
        "schema": 1,
        "system": "CXL-B",
        "model": "RM1",
        "medium": "tmpfs",
        "batches": 2,
        "seconds": 0.02,
        "locality": {"reuse": 0.5},
        "phases": [
            {"name": "lookup", "seconds": 0.002, "bytes_read": 400_000_000},
            {"name": "log_rows", "seconds": 0.002, "bytes_written": 60_000_000},
            {"name": "dense", "seconds": 0.006},
            {"name": "update", "seconds": 0.002, "bytes_written": 60_000_000},
        ],
        "spans": [
            {"batch": b, "phase": name, "start": (10 * b + s) / 1e3, "end": (10 * b + e) / 1e3}
            for b in range(2)
            for name, s, e in order
        ],
    }
    tree |= changes
    path = tmp_path / "run.json"
    path.write_text(json.dumps(tree))
    return path


def test_profile_is_projected_with_measured_and_modelled_phases(tmp_path, hardware):
    profile = read_profile(profile_file(tmp_path))
    found, refused = project(profile, hardware)
    assert refused == {}
    assert [p.system for p in found] == list(SYSTEMS)
    for projection in found:
        assert set(projection.measured) == {
            "bottom_forward", "top", "bottom_backward", "distinct rows",
        }  # fmt: skip
        assert "log_rows" in projection.modelled
        work = projection.result.work_s
        assert work["top MLP"] + work["bottom MLP"] == pytest.approx(0.006)
    cxl = next(p for p in found if p.system == "CXL").result
    assert cxl.bytes_moved["pmem write"] == pytest.approx(2 * 0.15 * 419_430_400, rel=0.01)


def test_profile_in_order_has_no_violations(tmp_path, hardware):
    assert order_violations(read_profile(profile_file(tmp_path)), hardware) == []


@pytest.mark.parametrize(
    ("moved", "sentence"),
    [
        (("update", 3.5, 10.0), "update started 0.004500 s before dense of batch 0"),
        (("log_rows", 1.0, 4.0), "log_rows started 0.001000 s before lookup of batch 0"),
        (("log_rows", 2.0, 9.0), "update started 0.001000 s before log_rows of batch 0"),
    ],
)
def test_profile_that_breaks_the_partial_order_is_reported(moved, sentence, tmp_path, hardware):
    spans = [moved if name == moved[0] else (name, s, e) for name, s, e in ORDERED]
    found = order_violations(read_profile(profile_file(tmp_path, spans)), hardware)
    assert any(sentence.replace("before dense", "before top") in text for text in found), found


def test_announced_log_may_begin_before_the_lookup_but_not_before_the_last_but_one_update(
    tmp_path, hardware
):
    early = [("log_rows", 0.0, 1.0), *ORDERED[2:], ("lookup", 1.5, 2.0)]
    path = profile_file(tmp_path, early, log="announced")
    assert order_violations(read_profile(path), hardware) == []
    assert order_violations(read_profile(profile_file(tmp_path, early)), hardware) != []
    spans = [
        {"batch": batch, "phase": phase, "start": start, "end": end}
        for batch, phase, start, end in [(0, "update", 0.0, 0.5), (2, "log_rows", 0.2, 0.6)]
    ]
    (found,) = order_violations(
        read_profile(profile_file(tmp_path, log="announced", spans=spans)), hardware
    )
    assert "log_rows started 0.300000 s before update of batch 0" in found


def test_distinct_rows_are_taken_as_counted(tmp_path, hardware):
    path = profile_file(tmp_path, locality={"reuse": 0.5, "unique_share": 0.4})
    found, _ = project(read_profile(path), hardware)
    assert "distinct rows" in found[0].measured
    cxl = next(p for p in found if p.system == "CXL").result
    assert cxl.bytes_moved["pmem write"] == pytest.approx(2 * 0.4 * 419_430_400, rel=0.01)


def test_log_may_overlap_the_dense_part_but_not_the_last_update(tmp_path, hardware):
    spans = [("lookup", -1.0 + 1.0, 2.0), ("log_rows", 2.0, 8.0), *ORDERED[2:]]
    assert order_violations(read_profile(profile_file(tmp_path, spans)), hardware) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"schema": 2}, "'schema' is not 1"),
        ({"system": "PMEM"}, "one of CXL-B, CXL"),
        ({"speed": 1}, "'speed' is unknown"),
        ({"log": "early"}, "'log' is 'early'"),
        ({"model": "RM9"}, "'RM9'"),
        ({"model": 3}, "'model' is 3"),
        ({"batches": 0}, "'batches' is 0"),
        ({"seconds": -1}, "'seconds' is -1"),
        ({"phases": [{"name": "lokup", "seconds": 1}]}, "did you mean 'lookup'"),
        ({"phases": [{"name": "lookup", "seconds": "fast"}]}, "phases.lookup.seconds"),
        ({"phases": [{"name": "lookup", "bytes": 1}]}, "phases.bytes"),
        ({"spans": [{"batch": 0}]}, "malformed"),
        ({"spans": [{"batch": 0, "phase": "top", "start": 2, "end": 1}]}, "ends before it starts"),
        ({"locality": {"skew": 1}}, "locality.skew"),
    ],
)
def test_bad_profiles(changes, words, tmp_path):
    with pytest.raises(ParameterError) as error:
        read_profile(profile_file(tmp_path, **changes))
    assert words in str(error.value)
    assert "run.json" in str(error.value) or "RM9" in words or "--model" in str(error.value)


def test_profile_that_is_not_json(tmp_path):
    path = tmp_path / "run.json"
    path.write_text("{")
    with pytest.raises(ParameterError, match="cannot be read"):
        read_profile(path)
    path.write_text("[]")
    with pytest.raises(ParameterError, match="schema"):
        read_profile(path)
