"""The dense part's matrix products: both are exact to float32, the choice is measured once, kept in
the pool and said, and a run through kills has the bits of one that was left alone.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from trainingcxl import train_setup
from trainingcxl.config import load_settings
from trainingcxl.errors import ConfigError, RecoveryError
from trainingcxl.evaluation import TrainedPool
from trainingcxl.models import DLRM
from trainingcxl.models.linear import (
    GEMMS,
    Linear,
    Timing,
    has_onednn,
    layer_flops,
    measure_gemms,
    set_gemm,
)
from trainingcxl.pool import Pool, inspect
from trainingcxl.resume import changed_environment, cpu_model, environment
from trainingcxl.train import train
from trainingcxl.train_setup import Silent

needs_onednn = pytest.mark.skipif(not has_onednn(), reason="torch without oneDNN")
# Large enough to be measured.
WIDE = ["run.batch_size=256", "model.bottom=512-64", "model.top=512-64"]
SMALL = ["run.batch_size=32", "model.bottom=48", "model.top=48"]


@pytest.fixture(autouse=True)
def restored_torch():
    """Undo what `prepare_torch` sets for the whole process."""
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    fills = torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = fills


class Recorder(Silent):
    """Keeps events; stops after so many batches."""

    def __init__(self, stop_at: int | None = None):
        self.stop_at, self.requested, self.events = stop_at, False, []

    def event(self, name, **values):
        self.events.append((name, values))

    def progress(self, work, done, total, **values):
        self.requested = self.requested or (work == "train" and done == self.stop_at)

    def all(self, name):
        return [values for event, values in self.events if event == name]

    def only(self, name):
        (values,) = self.all(name)
        return values


def run(path: Path, *options: str, stop_at: int | None = None) -> Recorder:
    recorder = Recorder(stop_at)
    settings = load_settings(
        assignments=[
            "data.source=synthetic:tiny?samples=1000",
            "run.threads=1",
            "run.device=cpu",
            "model.embedding_dim=4",
            f"pool.path={path}",
            *options,
        ]
    )
    train(settings, recorder, recorder)
    return recorder


def digest(path: Path) -> str:
    return str(inspect(path, digest=True)["digest"])


def recorded(path: Path) -> str:
    with Pool(path, read_only=True) as pool:
        return pool.resume_record["volatile"]["remarks"]["dense.gemm"]


class Embeddings(nn.Module):
    feature_dims = (4, 4)

    def forward(self, sparse):
        return torch.zeros(len(sparse), 8)


def model(width: int = 64) -> DLRM:
    return DLRM(Embeddings(), num_dense=13, bottom=[width], top=[width])


@pytest.fixture
def timings(monkeypatch):
    """Replaces the measurement by a table of least and median milliseconds, to be filled."""
    table = {}
    monkeypatch.setattr(train_setup, "measure_gemms", lambda *_: table)
    return table


# --- the products


@needs_onednn
@pytest.mark.parametrize("needs_input_grad", [True, False])
def test_both_are_exact_to_float32(needs_input_grad):
    torch.manual_seed(0)
    layer = Linear(367, 130)
    given = torch.randn(257, 367, requires_grad=needs_input_grad)
    grad = torch.randn(257, 130).t().contiguous().t()  # not contiguous, as autograd may give it
    exact = layer.__class__(367, 130).double()
    exact.load_state_dict(layer.state_dict())
    wide = given.detach().double().requires_grad_(needs_input_grad)
    exact(wide).backward(grad.double())
    for gemm in GEMMS:
        set_gemm(layer, gemm)
        layer.zero_grad()
        given.grad = None
        output = layer(given)
        output.backward(grad)
        for mine, true in [
            (output, exact(wide)),
            (layer.weight.grad, exact.weight.grad),
            (layer.bias.grad, exact.bias.grad),
            *([(given.grad, wide.grad)] if needs_input_grad else []),
        ]:
            error = (mine.double() - true).abs().max() / true.abs().max()
            assert error < 2e-6, gemm


@needs_onednn
def test_less_than_float32_is_not_taken():
    """What BF16 gives depends on the CPU: either it is exact all the same, or refused."""
    program = (
        "import torch; from trainingcxl.models.linear import Linear, has_onednn, set_gemm\n"
        "layer = Linear(512, 300); given = torch.randn(256, 512)\n"
        "exact = given.double() @ layer.weight.double().t() + layer.bias.double()\n"
        "set_gemm(layer, 'onednn')\n"
        "error = (layer(given).double() - exact).abs().max() / exact.abs().max()\n"
        "print(has_onednn(), bool(error < 1e-5))"
    )
    both = [("True", "True"), ("False", "False")]
    for mode, expected in (("STRICT", both[:1]), ("BF16", both)):
        done = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            env={**os.environ, "ONEDNN_DEFAULT_FPMATH_MODE": mode},
            timeout=100,
            check=True,
        )
        assert tuple(done.stdout.split()) in expected


@needs_onednn
def test_what_onednn_does_not_take_goes_torchs_way():
    layer = Linear(8, 4)
    set_gemm(layer, "onednn")
    assert layer(torch.ones(2, 3, 8)).shape == (2, 3, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(torch.ones(2, 8)).dtype == torch.bfloat16
    assert layer.double()(torch.ones(2, 8, dtype=torch.float64)).dtype == torch.float64


def test_layers_have_the_names_and_values_of_torchs():
    assert list(model().state_dict()) == [
        "bottom.0.weight", "bottom.0.bias", "bottom.2.weight", "bottom.2.bias",
        "top.0.weight", "top.0.bias", "top.2.weight", "top.2.bias",
    ]  # fmt: skip


@needs_onednn
def test_measurement_leaves_the_model_and_the_generators_alone():
    measured = model()
    set_gemm(measured, "onednn")
    before = {name: value.clone() for name, value in measured.state_dict().items()}
    state = torch.get_rng_state()
    found = measure_gemms(measured, 32)
    assert set(found) == set(GEMMS)
    assert all(0 < timing.least <= timing.median for timing in found.values())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[name], value) for name, value in measured.state_dict().items())
    assert all(parameter.grad is None for parameter in measured.parameters())
    assert {m.gemm for m in measured.modules() if isinstance(m, Linear)} == {"onednn"}


def test_operations_are_counted():
    assert layer_flops(nn.Sequential(Linear(3, 5), nn.ReLU(), Linear(5, 1)), 7) == 6 * 7 * 20


# --- the choice


@needs_onednn
@pytest.mark.parametrize(
    ("mkl", "onednn", "chosen"),
    [
        (Timing(least=10, median=12), Timing(least=8, median=10), "onednn"),
        (Timing(least=10, median=12), Timing(least=9.5, median=10), "mkl"),
        (Timing(least=10, median=12), Timing(least=8, median=11.5), "mkl"),
    ],
)
def test_faster_one_by_a_tenth_is_chosen_said_and_kept(
    tmp_path, timings, mkl, onednn, chosen, monkeypatch
):
    timings |= {"mkl": mkl, "onednn": onednn}
    pool = tmp_path / "a.pool"
    first = run(pool, *WIDE, stop_at=1)
    assert first.only("dense_gemm") == {
        "chosen": chosen, "why": "measured", "mkl_ms": mkl.median, "onednn_ms": onednn.median,
    }  # fmt: skip
    assert recorded(pool) == chosen

    monkeypatch.setattr(train_setup, "measure_gemms", lambda *_: pytest.fail("measured anew"))
    again = run(pool, *WIDE)
    assert again.only("dense_gemm") == {"chosen": chosen, "why": "as the pool was trained"}
    assert again.all("setting_changed") == []
    assert recorded(pool) == chosen
    assert run(pool, *WIDE).all("setting_changed") == []  # finished


def test_small_products_are_not_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(train_setup, "measure_gemms", lambda *_: pytest.fail("measured"))
    found = run(tmp_path / "a.pool", *SMALL, stop_at=1).only("dense_gemm")
    assert (found["chosen"], found["why"]) == ("mkl", "the products are too small to matter")


@needs_onednn
def test_another_choice_on_resume_is_reported(tmp_path):
    pool = tmp_path / "a.pool"
    run(pool, *SMALL, "dense.gemm=mkl", stop_at=2)
    changed = run(pool, *SMALL, "dense.gemm=onednn").only("setting_changed")
    assert changed == {
        "setting": "dense.gemm", "before": "mkl", "now": "onednn", "effect": "on the last bits",
    }  # fmt: skip
    assert recorded(pool) == "onednn"


def test_pool_from_before_the_choice_goes_on_with_torchs(tmp_path):
    record = {"settings": {}, "volatile": {"remarks": {}}}
    settings = load_settings(assignments=WIDE)
    recorder = Recorder()
    chosen = train_setup.choose_gemm(model(), settings, record, torch.device("cpu"), recorder)
    assert chosen == "mkl"
    assert recorder.only("dense_gemm")["why"] == "as the pool was trained"


def test_torch_without_onednn(monkeypatch):
    monkeypatch.setattr(train_setup, "has_onednn", lambda: False)
    cpu, recorder = torch.device("cpu"), Recorder()
    auto, forced = load_settings(assignments=WIDE), load_settings(assignments=["dense.gemm=onednn"])
    assert train_setup.choose_gemm(model(), auto, None, cpu, recorder) == "mkl"
    with pytest.raises(ConfigError, match="--dense-gemm mkl"):
        train_setup.choose_gemm(model(), forced, None, cpu, recorder)
    record = {"volatile": {"remarks": {"dense.gemm": "onednn"}}}
    assert train_setup.choose_gemm(model(), auto, record, cpu, recorder) == "mkl"
    assert "the last bits may differ" in recorder.only("notice")["text"]
    strict = auto.with_values({"run.strict": True})
    with pytest.raises(ConfigError, match="has no oneDNN here"):
        train_setup.choose_gemm(model(), strict, record, cpu, recorder)


@needs_onednn
@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="torch without MKL")
def test_slow_path_of_mkl_is_left(tmp_path):
    """MKL's code for all CPUs stands for CPUs where it takes a slow path."""
    command = [sys.executable, "-m", "trainingcxl", "train", "--json", "--threads", "1"]
    command += ["--data", "synthetic:tiny?samples=1200", "--batch-size", "1024"]
    done = subprocess.run(
        [*command, "--pool", str(tmp_path / "a.pool")],
        capture_output=True,
        text=True,
        env={**os.environ, "MKL_CBWR": "COMPATIBLE"},
        timeout=100,
        check=True,
    )
    assert '"chosen": "onednn", "why": "measured"' in done.stdout, done.stdout
    assert recorded(tmp_path / "a.pool") == "onednn"


# --- the same bits


@needs_onednn
def test_onednn_through_stops_and_a_kill_has_the_bits_of_a_run_left_alone(tmp_path):
    options = [*SMALL, "dense.gemm=onednn", "data.shuffle=true", "run.epochs=2"]
    whole = run(tmp_path / "whole.pool", *options)
    run(tmp_path / "stopped.pool", *options, stop_at=5)
    killed = subprocess.run(
        [
            sys.executable,
            "-c",
            "import os, signal, sys; from trainingcxl.train import Training, train\n"
            "step = Training._report_progress\n"
            "def dying(self):\n"
            "    if self.trained == 31: os.kill(os.getpid(), signal.SIGKILL)\n"
            "    step(self)\n"
            "Training._report_progress = dying\n"
            "from trainingcxl.config import load_settings\n"
            "from trainingcxl.train_setup import Silent\n"
            "train(load_settings(assignments=sys.argv[1:]), Silent(), Silent())",
            "data.source=synthetic:tiny?samples=1000",
            "run.threads=1",
            "run.device=cpu",
            "model.embedding_dim=4",
            f"pool.path={tmp_path / 'stopped.pool'}",
            *options[:-1],
            "run.epochs=2",
            "dense.gemm=auto",
        ],
        capture_output=True,
        timeout=100,
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    resumed = run(tmp_path / "stopped.pool", *options, "dense.gemm=auto")
    assert resumed.only("recovery")["committed_batch"] == 31
    assert resumed.only("dense_gemm")["chosen"] == "onednn"
    assert resumed.only("result")["auc"] == whole.only("result")["auc"]
    assert digest(tmp_path / "stopped.pool") == digest(tmp_path / "whole.pool")


@needs_onednn
def test_evaluation_uses_the_products_of_the_training(tmp_path, monkeypatch):
    chosen = []

    def note(model, gemm):
        chosen.append(gemm)
        set_gemm(model, gemm)

    monkeypatch.setattr("trainingcxl.evaluation.set_gemm", note)
    pool = tmp_path / "a.pool"
    trained = run(pool, *SMALL, "dense.gemm=onednn").only("result")
    with TrainedPool(pool, {}, Silent()) as found:
        samples = found.samples()
        metrics = found.score(samples).metrics()
    assert (metrics.auc, metrics.log_loss) == (trained["auc"], trained["log_loss"])
    assert chosen == ["onednn"]


# --- another CPU


def test_another_cpu_is_a_notice_and_an_error_when_strict(tmp_path, monkeypatch):
    pool = tmp_path / "a.pool"
    run(pool, *SMALL, stop_at=2)
    here = environment()["cpu_model"]
    monkeypatch.setattr("trainingcxl.resume.cpu_model", lambda: "Another CPU 25 1")
    with pytest.raises(RecoveryError, match="cpu_model is Another CPU 25 1"):
        run(pool, *SMALL, "run.strict=true", stop_at=3)
    notices = [event["text"] for event in run(pool, *SMALL).all("notice")]
    wanted = f"cpu_model is Another CPU 25 1, the pool was trained with {here}"
    assert [text for text in notices if text.startswith(wanted)]


def test_pool_from_before_the_cpu_was_recorded_gives_no_notice():
    old = {name: value for name, value in environment().items() if name != "cpu_model"}
    pool = SimpleNamespace(lookup="strict")
    assert changed_environment(pool, old, is_error=True) == []


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (
            "processor\t: 0\nvendor_id\t: GenuineIntel\ncpu family\t: 6\nmodel\t\t: 143\n"
            "model name\t: A CPU @ 2.00GHz\nstepping\t: 8\n\nprocessor\t: 1\nmodel\t\t: 1\n",
            "A CPU @ 2.00GHz 6 143",
        ),
        (
            "processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd0c\n",
            "0x41 0xd0c",
        ),
    ],
)
def test_cpu_is_told_by_name_family_and_model(tmp_path, text, name):
    (tmp_path / "cpuinfo").write_text(text)
    assert cpu_model(tmp_path / "cpuinfo") == name


def test_cpu_without_a_description(tmp_path):
    assert cpu_model(tmp_path / "nothing") == environment()["machine"]
