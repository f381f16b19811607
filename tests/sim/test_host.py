"""Calibration of this machine and the prediction of an embedding step from it."""

import functools
from dataclasses import asdict, replace

import pytest
from click.testing import CliRunner

from trainingcxl.cli.simulate import command
from trainingcxl.sim import ParameterError, find_model
from trainingcxl.sim.host import (
    HostCalibration,
    calibrate_host,
    predict_host_step,
    read_calibration,
    write_calibration,
)


@pytest.fixture(scope="module")
def calibration(tmp_path_factory) -> HostCalibration:
    return calibrate_host(tmp_path_factory.mktemp("host"), table_bytes=64 << 20, rounds=1)


def test_calibration_is_plausible_and_leaves_nothing_behind(tmp_path):
    found = calibrate_host(tmp_path, table_bytes=32 << 20, rounds=1)
    assert list(tmp_path.iterdir()) == []
    assert 0.1 < found.stream_gbps < 1000
    assert found.cached_64_ns < found.gather_64_ns * 3
    assert found.gather_512_ns > found.gather_64_ns * 0.5
    assert found.page_bytes >= 4096


def test_calibration_file_round_trips(calibration, tmp_path):
    path = tmp_path / "host.toml"
    write_calibration(calibration, path)
    assert read_calibration(path) == calibration
    path.write_text(path.read_text() + "speed = 3\n")
    with pytest.raises(ParameterError, match=r"host\.speed"):
        read_calibration(path)


def test_command_writes_the_file(tmp_path, monkeypatch):
    import trainingcxl.sim.host as module

    small = functools.partial(calibrate_host, table_bytes=32 << 20, rounds=1)
    monkeypatch.setattr(module, "calibrate_host", small)
    path = tmp_path / "host.toml"
    result = CliRunner().invoke(command, ["--calibrate-host", str(path)])
    assert result.exit_code == 0, result.output
    assert "measured on this machine" in result.stdout
    assert read_calibration(path).log_gbps > 0


def worked() -> HostCalibration:
    """Round numbers: every kind of row costs its size in ns at 64 B, twice that at 128 B, ..."""
    values = {}
    for kind, factor in (("gather", 1.0), ("update", 2.0), ("sparse", 4.0), ("cached", 0.1)):
        values |= {f"{kind}_{size}_ns": factor * size for size in (64, 128, 256, 512)}
    return HostCalibration(
        latency_ns=100.0, stream_gbps=10.0, sort_ns=10.0, log_gbps=10.0, sync_ms=1.0,
        page_bytes=4096, cache_bytes=1 << 20, **values,
    )  # fmt: skip


def test_prediction_by_hand():
    # Shape i: L = 1,310,720 lookups of 128 B; half of them distinct: 655,360 rows, 2.6 a page.
    # pooled 2048 * 8 * 32 * 4 B = 2,097,152 B, of which the cache holds half.
    model = find_model("i")
    model = model.with_locality(replace(model.locality, unique_share=0.5))
    found = predict_host_step(model, worked())
    count = 1_310_720
    assert found.lookup_s == pytest.approx(count * 128e-9 + 2_097_152 / 10e9)
    assert found.sort_s == pytest.approx(count * 10e-9)
    assert found.reduce_s == pytest.approx(count * (0.5 * 12.8e-9 + 0.5 * 128e-9))
    assert found.update_s == pytest.approx(655_360 * 256e-9)
    assert found.log_s == pytest.approx(655_360 * 128 / 10e9)
    assert found.seconds == pytest.approx(sum(asdict(found).values()))


def test_prediction_grows_with_rows_and_bytes(calibration):
    small, large = find_model("iii16"), find_model("iii128")
    assert (
        predict_host_step(small, calibration).seconds
        < predict_host_step(large, calibration).seconds
    )
