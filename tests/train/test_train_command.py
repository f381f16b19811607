"""`trainingcxl train`: resume, refusal, early stopping, signals; whole runs, compared by digest."""

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from trainingcxl.cli import main
from trainingcxl.config import Settings, load_settings
from trainingcxl.data import Dataset, Rows, open_data
from trainingcxl.errors import ConfigError, DurabilityUnavailable, RecoveryError, TrainingCXLError
from trainingcxl.pool import Pool, inspect
from trainingcxl.train import EarlyStopping, Training, learning_rate_factor, train
from trainingcxl.train_setup import Silent, check_settings, prepare_torch, settings_to_record

SMALL = [
    "data.source=synthetic:tiny?samples=1200",
    "run.batch_size=32",
    "run.threads=1",
    "run.device=cpu",
    "model.bottom=16",
    "model.top=16",
    "model.embedding_dim=4",
    "eval.fraction=0.2",
]
BATCHES_PER_EPOCH = 30


class Recorder:
    """Keeps every event, and asks to stop once a number of batches has been committed."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.stop_at = stop_at
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.requested = False

    def event(self, name: str, **values: Any) -> None:
        self.events.append((name, values))

    def progress(self, work: str, done: int, total: int, **values: Any) -> None:
        if work == "train" and self.stop_at is not None and done >= self.stop_at:
            self.requested = True

    def deferred(self) -> nullcontext[None]:
        return nullcontext()

    def all(self, name: str) -> list[dict[str, Any]]:
        return [values for event, values in self.events if event == name]

    def only(self, name: str) -> dict[str, Any]:
        (values,) = self.all(name)
        return values


def small(pool: Path, *assignments: str) -> Settings:
    return load_settings(assignments=[*SMALL, f"pool.path={pool}", *assignments])


def run(pool: Path, *assignments: str, stop_at: int | None = None) -> Recorder:
    """Train once in this process; a run that is stopped leaves the pool as a clean end would."""
    recorder = Recorder(stop_at)
    train(small(pool, *assignments), recorder, recorder)
    return recorder


def digest(pool: Path) -> str:
    return str(inspect(pool, digest=True)["digest"])


def bytes_of(pool: Path) -> dict[str, str]:
    files = sorted(path for path in pool.rglob("*") if path.is_file())
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def train_over(data: Dataset, settings: Settings, recorder: Recorder) -> None:
    """Train on data that no source text names."""
    with Pool(settings.pool.path) as pool:
        Training(settings, data, pool, torch.device("cpu"), recorder, Silent()).go_on()


@pytest.mark.parametrize("stops", [[1], [7, 8, 29], [30], [31, 59]])
@pytest.mark.parametrize("shuffle", ["true", "false"])
def test_stopped_run_ends_like_one_that_never_stopped(
    tmp_path: Path, stops: list[int], shuffle: str
) -> None:
    """Cases A1, A2, A5: the next batch is the one after the last committed, at any point."""
    settings = ["run.epochs=2", f"data.shuffle={shuffle}"]
    whole = run(tmp_path / "whole.pool", *settings)
    for batch in stops:
        stopped = run(tmp_path / "stopped.pool", *settings, stop_at=batch)
        assert stopped.only("stopped")["committed_batch"] == batch
    resumed = run(tmp_path / "stopped.pool", *settings)
    assert resumed.only("recovery")["resumed_batch"] == stops[-1]
    assert digest(tmp_path / "stopped.pool") == digest(tmp_path / "whole.pool")
    assert resumed.only("result")["auc"] == whole.only("result")["auc"]
    assert inspect(tmp_path / "stopped.pool")["committed_batch"] == 2 * BATCHES_PER_EPOCH


def test_start_says_where_and_how_often_the_run_is_durable(tmp_path: Path) -> None:
    """Case D12, and the level that is really given (D18)."""
    found = run(tmp_path / "a.pool", "eval.fraction=0", stop_at=3).only("durability")
    assert found["pool"] == str(tmp_path / "a.pool")
    assert found["level"] == "process"
    assert found["survives"] == "kill -9"
    assert found["every_batches"] == 1
    resumed = run(tmp_path / "a.pool", "eval.fraction=0")
    assert resumed.only("recovery")["committed_batch"] == 3


def test_a_resume_that_names_no_level_keeps_that_of_the_pool(tmp_path: Path) -> None:
    pool = tmp_path / "a.pool"
    run(pool, "pool.durability=power", stop_at=3)
    assert run(pool, stop_at=5).only("durability")["level"] == "power"
    with pytest.raises(DurabilityUnavailable, match="created with durability 'power'"):
        run(pool, "pool.durability=process")
    assert run(pool, "pool.durability=power").all("setting_changed") == []
    assert run(pool).only("finished")["committed_batch"] == BATCHES_PER_EPOCH


def test_a_snapshot_of_a_pool_of_level_power_can_be_trained_on(tmp_path: Path) -> None:
    """It is of level process itself, as its medium may give no more."""
    pool = tmp_path / "a.pool"
    run(pool, "pool.durability=power", stop_at=3)
    with Pool(pool, read_only=True) as source:
        source.snapshot(tmp_path / "copy.pool")
    for level in ([], ["pool.durability=process"]):
        stop_at = None if level else 5
        resumed = run(tmp_path / "copy.pool", *level, stop_at=stop_at)
        assert resumed.only("durability")["level"] == "process"
    run(pool)
    assert digest(tmp_path / "copy.pool") == digest(pool)


def test_finished_run_says_so_and_changes_nothing(tmp_path: Path) -> None:
    pool = tmp_path / "a.pool"
    run(pool)
    before = bytes_of(pool)
    again = run(pool)
    assert again.only("finished")["committed_batch"] == BATCHES_PER_EPOCH
    assert again.all("result") == []
    assert bytes_of(pool) == before
    with pytest.raises(ConfigError, match=r"run\.seed: 0 in the pool, 1 now"):
        run(pool, "run.seed=1")
    assert bytes_of(pool) == before


def test_more_epochs_continue_a_finished_run(tmp_path: Path) -> None:
    run(tmp_path / "grown.pool")
    grown = run(tmp_path / "grown.pool", "run.epochs=2")
    assert grown.only("setting_changed")["setting"] == "run.epochs"
    run(tmp_path / "whole.pool", "run.epochs=2")
    assert digest(tmp_path / "grown.pool") == digest(tmp_path / "whole.pool")


@pytest.mark.parametrize(
    ("assignment", "values"),
    [
        ("run.batch_size=16", "run.batch_size: 32 in the pool, 16 now"),
        ("run.seed=5", "run.seed: 0 in the pool, 5 now"),
        ("model.top=8", "model.top: '16' in the pool, '8' now"),
        ("rows.lr=0.5", "rows.lr: 0.02 in the pool, 0.5 now"),
        ("data.source=synthetic:tiny?samples=1300", "'synthetic:tiny?samples=1300' now"),
    ],
)
def test_setting_that_changes_the_result_is_refused(
    tmp_path: Path, assignment: str, values: str
) -> None:
    """Case B3: a changed learning rate is reported, not silently chosen."""
    pool = tmp_path / "a.pool"
    run(pool, stop_at=3)
    before = digest(pool)
    with pytest.raises(ConfigError) as caught:
        run(pool, assignment)
    assert values in str(caught.value)
    assert "--fresh" in str(caught.value)
    assert digest(pool) == before


def test_harmless_settings_are_reported_and_leave_the_bits(tmp_path: Path) -> None:
    run(tmp_path / "a.pool", stop_at=3)
    changed = run(tmp_path / "a.pool", "run.dense_every=5", "eval.every=7", "run.threads=2")
    found = {event["setting"]: event["effect"] for event in changed.all("setting_changed")}
    assert found == {
        "run.dense_every": "none on the bits",
        "eval.every": "none on the bits",
        "run.threads": "on the last bits",
    }
    run(tmp_path / "b.pool")
    assert inspect(tmp_path / "a.pool")["committed_batch"] == BATCHES_PER_EPOCH


def test_data_may_move_but_not_change(tmp_path: Path) -> None:
    settings = small(tmp_path / "a.pool")
    data = open_data(settings.data.source)
    recorder = Recorder()
    fixed, free = settings_to_record(settings, data)
    free["data.source"] = "csv:somewhere/else.csv"
    record = {"settings": fixed, "volatile": {"remarks": free}}
    check_settings(record, settings, data, recorder)
    assert recorder.only("setting_changed")["before"] == "csv:somewhere/else.csv"

    fixed["data.fingerprint"] = {**data.fingerprint, "seed": 77}
    free["data.source"] = settings.data.source
    with pytest.raises(ConfigError, match="fingerprint of the data, seed: 77 in the pool, 1 now"):
        check_settings(record, settings, data, recorder)


def test_pool_of_another_program_is_not_taken_over(tmp_path: Path) -> None:
    settings = small(tmp_path / "a.pool")
    record = {"settings": {"their": "own"}, "volatile": {"remarks": {}}}
    with pytest.raises(RecoveryError, match="was not trained by 'trainingcxl train'"):
        check_settings(record, settings, open_data(settings.data.source), Recorder())


def test_interrupted_creation_starts_anew_with_a_message(tmp_path: Path) -> None:
    pool = tmp_path / "a.pool"

    class Interrupting(Recorder):
        def progress(self, work: str, done: int, total: int, **values: Any) -> None:
            if work == "create tables":
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(small(pool), Interrupting(), Silent())
    assert pool.exists()
    again = run(pool)
    assert again.only("created_anew")["pool"] == str(pool)
    run(tmp_path / "b.pool")
    assert digest(pool) == digest(tmp_path / "b.pool")
    assert run(tmp_path / "c.pool").all("created_anew") == []


class Wrapped(Dataset):
    """A data set with something done to what is read."""

    def __init__(self, base: Dataset, change: Callable[[np.ndarray, Rows], None]) -> None:
        self.base, self.change = base, change
        self.num_samples, self.dense_names = base.num_samples, base.dense_names
        self.features, self.has_labels = base.features, base.has_labels
        self.fingerprint, self.report = base.fingerprint, base.report

    def read(self, samples: np.ndarray) -> Rows:
        rows = self.base.read(samples)
        self.change(samples, rows)
        return rows


def test_held_out_rows_never_touch_the_pool(tmp_path: Path) -> None:
    """Other labels in the held-out part change the figures and not one bit of the pool."""
    digests, aucs = [], []
    for number in range(2):

        def shuffle_held_out(samples: np.ndarray, rows: Rows, flip: int = number) -> None:
            held_out = samples >= 960
            rows.label[held_out] = np.abs(flip - rows.label[held_out])

        settings = small(tmp_path / f"{number}.pool", "eval.every=10")
        recorder = Recorder()
        train_over(Wrapped(open_data(settings.data.source), shuffle_held_out), settings, recorder)
        digests.append(digest(tmp_path / f"{number}.pool"))
        aucs.append(recorder.all("evaluation")[-1]["auc"])
        assert recorder.only("result")["unannounced_batches"] == 0  # evaluations do not get between
    assert digests[0] == digests[1]
    assert aucs[1] == pytest.approx(1 - aucs[0])


def test_batch_without_a_finite_loss_is_skipped_and_changes_no_row(tmp_path: Path) -> None:
    def spoil(samples: np.ndarray, rows: Rows) -> None:
        rows.dense[(samples >= 64) & (samples < 96)] = np.nan

    settings = small(
        tmp_path / "a.pool", "eval.fraction=0", "data.source=synthetic:tiny?samples=96"
    )
    recorder = Recorder()
    train_over(Wrapped(open_data(settings.data.source), spoil), settings, recorder)
    assert recorder.only("skipped")["batch"] == 3
    assert inspect(tmp_path / "a.pool")["committed_batch"] == 3
    shorter = small(tmp_path / "b.pool", "eval.fraction=0", "data.source=synthetic:tiny?samples=64")
    train_over(open_data(shorter.data.source), shorter, Recorder())
    with Pool(tmp_path / "a.pool", read_only=True) as a, Pool(tmp_path / "b.pool") as b:
        for name, table in a.tables.items():
            assert np.array_equal(table.weight, b.tables[name].weight)


def test_run_that_only_diverges_ends_with_an_error(tmp_path: Path) -> None:
    def spoil(samples: np.ndarray, rows: Rows) -> None:
        rows.dense[:] = np.nan

    settings = small(tmp_path / "a.pool")
    data = Wrapped(open_data(settings.data.source), spoil)
    with pytest.raises(TrainingCXLError, match="not finite for 11 batches in a row"):
        train_over(data, settings, Recorder())


EARLY = [
    "run.epochs=50",
    "eval.every=10",
    "eval.patience=3",
    "schedule.warmup=10",
    "schedule.decay_start=40",
    "schedule.decay_batches=2000",
    "rows.lr=0.1",
]


def test_early_stopping_and_schedule_survive_stops(tmp_path: Path) -> None:
    """Cases A6, A9: the patience counter does not start at 0, the final figures are the same."""
    whole = run(tmp_path / "whole.pool", *EARLY).only("result")
    assert whole["stopped_early"]
    end = whole["committed_batch"]
    assert end < 50 * BATCHES_PER_EPOCH
    for batch in sorted({9, 10, 11, 41, end - 20, end - 1}):
        run(tmp_path / "stopped.pool", *EARLY, stop_at=batch)
    resumed = run(tmp_path / "stopped.pool", *EARLY).only("result")
    assert (resumed["committed_batch"], resumed["auc"]) == (end, whole["auc"])
    assert digest(tmp_path / "stopped.pool") == digest(tmp_path / "whole.pool")


def test_run_that_stopped_early_is_finished(tmp_path: Path) -> None:
    """Case A9: calling it again says it is complete and leaves the pool's bytes."""
    run(tmp_path / "a.pool", *EARLY)
    before = bytes_of(tmp_path / "a.pool")
    again = run(tmp_path / "a.pool", *EARLY)
    assert len(again.all("finished")) == 1
    assert bytes_of(tmp_path / "a.pool") == before
    longer = run(tmp_path / "a.pool", *EARLY, "run.epochs=60")
    assert longer.only("finished")["stopped_early"]
    assert bytes_of(tmp_path / "a.pool") == before


def test_early_stopping_counts_disappointments() -> None:
    stopping = EarlyStopping(2)
    for batch, auc, stopped in [(1, 0.6, False), (2, 0.5, False), (3, 0.7, False), (4, 0.7, False)]:
        stopping.see(batch, auc)
        assert stopping.stopped is stopped
    stopping.see(4, 0.1)  # the same evaluation again, after a resume
    assert not stopping.stopped
    copy = EarlyStopping(2)
    copy.load_state_dict(json.loads(json.dumps(stopping.state_dict())))
    copy.see(5, 0.2)
    assert copy.stopped


def test_learning_rate_rises_stays_and_falls() -> None:
    schedule = load_settings(
        assignments=[
            "schedule.warmup=4",
            "schedule.decay_start=10",
            "schedule.decay_batches=10",
        ]
    ).schedule
    factors = [learning_rate_factor(schedule, batch) for batch in (0, 1, 3, 4, 10, 15, 20, 99)]
    assert factors == [0.25, 0.5, 1.0, 1.0, 1.0, 0.25, 0.0, 0.0]
    assert learning_rate_factor(Settings().schedule, 12345) == 1.0


def test_gpu_that_is_not_there_is_wrong_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="sees no GPU"):
        prepare_torch(load_settings(flags={"run.device": "cuda"}).run)
    assert prepare_torch(Settings().run) == torch.device("cpu")


# --- the command in a process of its own ----------------------------------------------------------


def start(pool: Path, *options: str) -> subprocess.Popen[str]:
    source = "data.source=synthetic:tiny?samples=4000"
    settings = [*SMALL, f"pool.path={pool}", source]
    arguments = [part for text in settings for part in ("--set", text)]
    return subprocess.Popen(
        [sys.executable, "-m", "trainingcxl", "train", "--json", *arguments, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )


def end(process: subprocess.Popen[str]) -> dict[str, dict[str, Any]]:
    """Wait for the process and return its last event of each name."""
    output, errors = process.communicate(timeout=100)
    assert process.returncode == 0, errors
    return {event["event"]: event for event in map(json.loads, output.splitlines())}


def signal_while_training(process: subprocess.Popen[str], number: int, after: int) -> int:
    """Send a signal once some batches are committed; return the exit code."""
    assert process.stdout is not None
    for line in process.stdout:
        if json.loads(line).get("committed_batch", 0) >= after:
            process.send_signal(number)
            break
    process.communicate(timeout=100)
    return process.returncode


def test_killed_command_resumes_to_the_same_bits_with_other_threads(tmp_path: Path) -> None:
    """SIGKILL in mid-training: rows of the batch in flight are on the medium, its commit is not.

    Without the undo log they would stay; without the resume record the run would train batches
    twice or not at all.
    """
    whole = start(tmp_path / "whole.pool", "--epochs", "3")
    killed = start(tmp_path / "killed.pool", "--epochs", "3")
    assert signal_while_training(killed, signal.SIGKILL, after=1) == -signal.SIGKILL
    events = end(start(tmp_path / "killed.pool", "--epochs", "3", "--threads", "3"))
    assert 1 <= events["recovery"]["committed_batch"] < 300
    assert events["recovery"]["batches_to_redo"] <= 2
    assert events["result"]["committed_batch"] == 300
    assert events["result"]["auc"] == end(whole)["result"]["auc"]
    assert digest(tmp_path / "killed.pool") == digest(tmp_path / "whole.pool")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_ends_the_command_with_its_code_and_all_committed(
    tmp_path: Path, number: int, code: int
) -> None:
    process = start(tmp_path / "a.pool", "--epochs", "100")
    assert signal_while_training(process, number, after=1) == code
    found = inspect(tmp_path / "a.pool")
    assert found["clean"]
    assert found["committed_batch"] == found["durable_batch"] >= 1


def test_fresh_discards_and_only_fresh(tmp_path: Path) -> None:
    def train_in_this_process(*options: str) -> dict[str, dict[str, Any]]:
        settings = [*SMALL, f"pool.path={tmp_path / 'a.pool'}"]
        arguments = [part for text in settings for part in ("--set", text)]
        result = CliRunner().invoke(main, ["train", "--json", *arguments, *options])
        assert result.exit_code == 0, result.output
        return {event["event"]: event for event in map(json.loads, result.stdout.splitlines())}

    first = train_in_this_process()
    assert "finished" in train_in_this_process()
    fresh = train_in_this_process("--fresh", "--seed", "4")
    assert fresh["durability"]["uuid"] != first["durability"]["uuid"]
    assert fresh["result"]["committed_batch"] == first["result"]["committed_batch"]
