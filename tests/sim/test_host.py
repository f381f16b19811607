"""Calibration of this machine and the prediction of an embedding step from it."""

import functools
from dataclasses import asdict, fields, replace

import numpy as np
import pytest
from click.testing import CliRunner

from trainingcxl.cli.simulate import command
from trainingcxl.sim import Model, ParameterError, find_model
from trainingcxl.sim.host import (
    HostCalibration,
    calibrate_host,
    median_calibration,
    predict_host_step,
    read_calibration,
    write_calibration,
)
from trainingcxl.sim.host_kernels import SPANS
from trainingcxl.sim.workload import Tables

BATCH, LOOKUPS, ROWS, DIM = 1024, 4, 1 << 20, 32
L = BATCH * LOOKUPS  # lookups of each of the two tables of `worked_model`
SIZE = 4 * DIM


@pytest.fixture(scope="module")
def calibration(tmp_path_factory) -> HostCalibration:
    return calibrate_host(tmp_path_factory.mktemp("host"), table_bytes=128 << 20, rounds=1)


def flat(**changed: float) -> HostCalibration:
    """Round numbers: a row costs the same wherever it was."""
    costs = {
        "dense": 100.0, "sparse": 100.0, "cold": 100.0, "few": 40.0, "many": 40.0,
        "few_update": 60.0, "many_update": 60.0, "scan": 1.0, "fill": 2.0, "pooled": 10.0,
    }  # fmt: skip
    values: dict[str, object] = {
        "latency_ns": 200.0, "store_gbps": 5.0, "sync_ms": 1.0, "scatter_ns": 2.0, "count_ns": 1.0,
        "merge_ns": 5.0, "word_ns": 0.5, "call_us": 2.0, "hand_over_us": 3.0, "page_bytes": 4096,
    }  # fmt: skip
    for entry in fields(HostCalibration):
        if entry.name not in values:
            kind = entry.name.removesuffix("_ns").rstrip("0123456789").rstrip("_")
            values[entry.name] = (costs[kind],) * len(SPANS)
    return HostCalibration(**(values | changed))


def worked_model(unique_share: float = 1.0) -> Model:
    model = find_model("i")
    group = Tables(count=2, rows=ROWS, lookups=LOOKUPS, dim=DIM)
    model = replace(model, batch=BATCH, tables=(group,))
    return model.with_locality(replace(model.locality, unique_share=unique_share))


def test_calibration_is_plausible_and_leaves_nothing_behind(calibration, tmp_path):
    found = calibrate_host(tmp_path, table_bytes=128 << 20, rounds=1)
    assert list(tmp_path.iterdir()) == []
    for one in (found, calibration):
        assert 0.05 < one.store_gbps < 1000
        assert one.dense_64_ns[0] < one.dense_64_ns[-1]
        assert one.dense_512_ns[-1] > one.dense_64_ns[-1] * 0.5
        assert one.few_update_128_ns[2] >= one.few_128_ns[2]
        assert one.page_bytes >= 4096
        assert one.log_gbps == 2 * one.store_gbps


def test_calibration_needs_room(tmp_path):
    with pytest.raises(ParameterError, match="scratch file") as caught:
        calibrate_host(tmp_path, table_bytes=1 << 60, rounds=1)
    assert str(tmp_path) in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_constants_are_medians_of_rounds():
    values = asdict(flat())
    del values["page_bytes"]
    rounds = [
        {name: v if isinstance(v, tuple) else v + k for name, v in values.items()}
        for k in (0.0, 1.0, 70.0)
    ]
    rounds[2]["scan_ns"] = tuple(x + 9.0 for x in values["scan_ns"])
    found = median_calibration(rounds)
    assert found.latency_ns == 201.0
    assert found.scan_ns == values["scan_ns"]


def test_calibration_file_round_trips(calibration, tmp_path):
    path = tmp_path / "host.toml"
    write_calibration(calibration, path)
    assert read_calibration(path) == calibration
    text = path.read_text()
    path.write_text(text + "speed = 3\n")
    with pytest.raises(ParameterError, match=r"host\.speed"):
        read_calibration(path)
    first = calibration.scan_ns[0]
    path.write_text(text.replace(f"scan_ns = [{first!r}", "scan_ns = [-1.0"))
    with pytest.raises(ParameterError, match=r"host\.scan_ns\[0\].*-1"):
        read_calibration(path)
    path.write_text(text.replace(f"scan_ns = [{first!r}, ", "scan_ns = ["))
    with pytest.raises(ParameterError, match=r"host\.scan_ns"):
        read_calibration(path)


def test_command_writes_the_file(tmp_path, monkeypatch):
    import trainingcxl.sim.host as module

    small = functools.partial(calibrate_host, table_bytes=128 << 20, rounds=1)
    monkeypatch.setattr(module, "calibrate_host", small)
    path = tmp_path / "host.toml"
    result = CliRunner().invoke(command, ["--calibrate-host", str(path)])
    assert result.exit_code == 0, result.output
    assert "measured on this machine" in result.stdout
    assert read_calibration(path).log_gbps > 0


def test_rows_between_sizes_and_spans():
    values = asdict(flat())
    values["dense_64_ns"] = tuple(float(k) for k in range(1, len(SPANS) + 1))
    values["dense_128_ns"] = tuple(3.0 * k for k in range(1, len(SPANS) + 1))
    host = HostCalibration(**values)
    assert host.row_s("dense", 64, SPANS[1]) == pytest.approx(2e-9)
    assert host.row_s("dense", 16, SPANS[1]) == pytest.approx(2e-9)
    assert host.row_s("dense", 96, SPANS[1]) == pytest.approx(4e-9)  # half way from 2 to 6
    middle = (SPANS[1] * SPANS[2]) ** 0.5
    assert host.row_s("dense", 64, middle) == pytest.approx(2.5e-9)
    assert host.row_s("dense", 64, np.array([1.0, 1e15])) == pytest.approx(
        [1e-9, len(SPANS) * 1e-9]
    )
    assert host.row_s("cold", 1024, 1.0) == pytest.approx(200e-9)  # twice a row of 512 B


# The distinct rows D of a table: ROWS (1 - (1 - 1 / ROWS) ** L) = 4088.01 for uniform rows, which
# the model's Poisson rates give as ROWS (1 - exp(-L / ROWS)).
D = ROWS * -np.expm1(-L / ROWS)


def test_fused_prediction_by_hand():
    found = predict_host_step(worked_model(), flat(), undo_log="fused")
    # Two tables. 4096 lookups of 100 ns; 1024 pooled rows of 128 B: 10 + 2 ns; 5120 numbers of 8 B
    # at 1 ns a 64-byte line: 1/8 ns; one latency of 200 ns.
    assert found.lookup_s == pytest.approx(
        2e-9 * (L * 100 + BATCH * 12 + (L + BATCH) / 8 + 200), rel=1e-6
    )
    # 20 bits of row number, a short sort by digits of 11: 2 passes of 2 + 1 ns.
    assert found.sort_s == pytest.approx(2e-9 * (2 * L * 3 + (4 * L + 2 * D) / 8), rel=1e-6)
    assert found.reduce_s == pytest.approx(2e-9 * (L * 100 + (L + 2 * D) / 8 + 200), rel=1e-6)
    # One row on 8 pages: the order is of no use (100 ns), storing adds 60 - 40 ns.
    assert found.update_s == pytest.approx(2e-9 * (D * 120 + 200), rel=1e-6)
    # A record: 17 words of 0.5 ns, 128 B at 10 GB/s, 12 B at 5 GB/s, and its row number.
    assert found.log_s == pytest.approx(2e-9 * D * (8.5 + 12.8 + 2.4 + 1 / 8), rel=1e-6)
    # 2 (4096 + 1024) numbers read five times; 262,144 B of gradients; one hand-over, ten calls.
    assert found.fixed_s == pytest.approx(
        1e-9 * (2 * (L + BATCH) * 5 / 8 + 2 * BATCH * SIZE / 64) + 3e-6 + 20e-6, rel=1e-6
    )
    assert found.seconds == pytest.approx(sum(asdict(found).values()))


def test_background_log_reads_the_rows_again_and_matches_them():
    fused = predict_host_step(worked_model(), flat(), undo_log="fused")
    found = predict_host_step(worked_model(), flat(), undo_log="background")
    own = D * np.exp(-L / ROWS)  # rows that the batch before did not change
    extra = own * 100 + 2 * D * 5 + 200
    assert found.log_s - fused.log_s == pytest.approx(2e-9 * extra, rel=1e-6)
    assert found.fixed_s - fused.fixed_s == pytest.approx(6e-6)
    with pytest.raises(ParameterError, match="undo_log is 'none'"):
        predict_host_step(worked_model(), flat(), undo_log="none")


def test_fewer_distinct_rows_are_nearer():
    # Repeats are found near, distinct rows far: with 1 ns below 1 MiB and 100 ns above.
    values = asdict(flat())
    for family in ("dense", "sparse", "cold"):
        values[f"{family}_128_ns"] = tuple(1.0 if s <= 1 << 20 else 100.0 for s in SPANS)
    host = HostCalibration(**values)
    costs = [
        predict_host_step(worked_model(share), host, undo_log="fused").lookup_s
        for share in (0.99, 0.6, 0.3, 0.1)
    ]
    assert costs == sorted(costs, reverse=True)
    assert costs[3] < 0.3 * costs[0]


def test_distinct_rows_are_those_of_the_model():
    # With nothing but the checksums, the log counts the distinct rows.
    host = flat(store_gbps=1e5, word_ns=1000.0)
    for share in (0.9, 0.5, 0.2):
        found = predict_host_step(worked_model(share), host, undo_log="fused")
        assert found.log_s / 17e-6 == pytest.approx(share * 2 * L, rel=1e-3)


def test_prediction_grows_with_rows_and_bytes(calibration):
    small, large = find_model("iii16"), find_model("iii128")
    assert (
        predict_host_step(small, calibration).seconds
        < predict_host_step(large, calibration).seconds
    )
