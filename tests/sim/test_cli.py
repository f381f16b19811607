"""The commands `simulate` and `reproduce`, and that they need neither torch nor the native core."""

import json
import subprocess
import sys

import numpy as np
import pytest
from click.testing import CliRunner

from trainingcxl.cli.reproduce import command as reproduce
from trainingcxl.cli.simulate import command as simulate


def run(*arguments: str, command=simulate):
    return CliRunner().invoke(command, list(arguments))


def good(*arguments: str):
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_text_says_that_it_is_a_model():
    result = run("--system", "CXL", "--model", "RM2", "--batches", "100")
    assert result.exit_code == 0
    for word in ("(model)", "top MLP", "stalls", "utilisation", "energy", "timeline", "MB"):
        assert word in result.stdout


def test_json_has_every_part():
    found = good("--system", "CXL-B", "--model", "RM4", "--engine", "event", "--batches", "12")
    assert found["kind"] == "model"
    for key in ("breakdown_s", "utilisation", "bytes_moved", "energy_j", "timeline"):
        assert found[key], key


def test_set_hardware_file_and_their_order(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text("[link]\nkind = 'cxl3'\n[media.pmem]\nread_after_write = 1.0\n")
    base = ("--system", "PCIe", "--model", "RM1")
    plain, filed = good(*base), good(*base, "--hardware", str(path))
    assert filed["seconds_per_batch"] < plain["seconds_per_batch"]
    back = good(
        *base, "--hardware", str(path),
        "--set", "link.bandwidth_gbps=25", "--set", "media.pmem.read_after_write=1.52",
    )  # fmt: skip
    assert back["seconds_per_batch"] == pytest.approx(plain["seconds_per_batch"])


def test_sweep():
    found = good("--system", "PCIe", "--sweep", "link.bandwidth_gbps=12.5,25,50")
    assert [p["value"] for p in found["points"]] == [12.5, 25, 50]
    times = [p["seconds_per_batch"] for p in found["points"]]
    assert times == sorted(times, reverse=True)


def test_show_hardware_lists_tag_and_source():
    result = run("--show-hardware", "--set", "link.bandwidth_gbps=50")
    assert "[F] fitted on T1" in result.stdout
    line = next(x for x in result.stdout.splitlines() if x.startswith("link.bandwidth_gbps"))
    assert "[U] --set" in line


def test_traces(tmp_path):
    path = tmp_path / "ids.npy"
    np.save(path, np.random.default_rng(0).integers(0, 1000, (64, 26)))
    model = tmp_path / "m.toml"
    model.write_text(
        'name = "m"\nbatch = 16\ninteraction = "cat"\nbottom = [13, 16]\ntop = [1]\n'
        "table = [{ count = 26, rows = 1000, lookups = 1, dim = 16 }]\n"
    )
    found = good("--trace", str(path), "--model", str(model))
    assert found["seconds_per_batch"] > 0
    zipf = good("--trace", "zipf:0.7", "--model", "RM3", "--engine", "event", "--batches", "6")
    assert zipf["seconds_per_batch"] > 0


def test_pool_failures_and_costs():
    found = good("--devices", "64", "--gpus", "8")
    assert found["samples_per_second"] > 0
    found = good("--mtbf-hours", "10")
    assert 0 < found["beyond"]["failures"]["goodput"] < 1
    assert found["beyond"]["costs"]["medium"] == "pmem"
    dram = good("--system", "DRAM", "--mtbf-hours", "10")
    assert dram["beyond"]["costs"]["medium"] == "dram"


@pytest.mark.parametrize(
    "arguments",
    [
        ("--system", "CXL-Z"),
        ("--model", "RM7"),
        ("--batches", "0"),
        ("--set", "link.bandwidth_gbps=0"),
        ("--set", "link.bandwidth_gbps=fast"),
        ("--set", "nonsense"),
        ("--sweep", "link.bandwidth_gbps="),
        ("--sweep", "link.bandwidth_gbps=1,-2"),
        ("--hardware", "/nonexistent.toml"),
        ("--trace", "/nonexistent.npy"),
        ("--trace", "zipf:2"),
        ("--trace", "zipf:x"),
        ("--from-profile", "/nonexistent.json"),
        ("--devices", "5000"),
        ("--devices", "0"),
        ("--mtbf-hours", "0"),
        ("--engine", "quantum"),
        ("--unknown",),
    ],
)
def test_wrong_use_exits_2_with_one_message(arguments):
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert "Error:" in result.output
    assert "Traceback" not in result.output


def test_reproduce_needs_a_destination():
    result = run(command=reproduce)
    assert result.exit_code == 2
    assert "--out" in result.output


ALONE = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "polars", "rich") or name == "trainingcxl._core":
            raise ImportError("blocked: " + name)

sys.meta_path.insert(0, Blocked())
import trainingcxl.sim
from trainingcxl.cli.simulate import command
command(["--model", "RM1", "--engine", "event", "--batches", "4"], standalone_mode=False)
loaded = [m for m in sys.modules if m.startswith("trainingcxl.")]
others = [m for m in loaded if not m.startswith(("trainingcxl.sim", "trainingcxl.cli"))]
assert set(others) <= {"trainingcxl.errors"}, others
"""


def test_the_simulator_stands_alone():
    done = subprocess.run(
        [sys.executable, "-c", ALONE], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "(model)" in done.stdout


@pytest.mark.samples
def test_criteo_trace(samples, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = samples / "criteo-kaggle-sample" / "train.head.txt.gz"
    model = tmp_path / "m.toml"
    model.write_text(
        'name = "m"\nbatch = 128\ninteraction = "dot"\nbottom = [13, 16]\ntop = [1]\n'
        "table = [{ count = 26, rows = 1000, lookups = 1, dim = 16 }]\n"
    )
    found = good("--trace", f"criteo:{path}", "--model", str(model))
    assert found["seconds_per_batch"] > 0
    assert run("--trace", f"criteo:{path}", "--model", "RM2").exit_code == 2
    assert run("--trace", "criteo:/nonexistent", "--model", str(model)).exit_code in (1, 2)
