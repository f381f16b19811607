"""The command line: exit codes, messages, and which commands may import torch."""

import io
import json
import resource
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import click
import pytest
from click.testing import CliRunner, Result

from trainingcxl.cli import program
from trainingcxl.cli.reporters import JsonReporter, LineReporter, make_reporter
from trainingcxl.cli.signals import Interrupted, StopSignals
from trainingcxl.errors import ConfigError, PoolCorrupted, PoolLocked
from trainingcxl.pool import Pool, TableSpec


def run(*arguments: str) -> Result:
    return CliRunner().invoke(program.main, list(arguments))


def cpu_seconds_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def run_raising(monkeypatch: pytest.MonkeyPatch, error: BaseException, *options: str) -> Result:
    """Run a command that fails with `error`."""

    @click.command("train")
    def command() -> None:
        raise error

    monkeypatch.setattr(program, "import_module", lambda _: SimpleNamespace(command=command))
    return run("train", *options)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("no"), 2),
        (PoolCorrupted("no"), 3),
        (PoolLocked("no"), 1),
        (ValueError("no"), 1),
        (IndexError("no"), 1),
        (FileNotFoundError(2, "no"), 1),
        (click.UsageError("no"), 2),
        (Interrupted(signal.SIGINT), 130),
        (Interrupted(signal.SIGTERM), 143),
        (KeyboardInterrupt(), 130),
    ],
)
def test_exit_code_tells_the_kind_of_failure(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int
) -> None:
    result = run_raising(monkeypatch, error)
    assert result.exit_code == code
    assert "Traceback" not in result.output


def test_error_is_shown_by_name_and_message(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run_raising(monkeypatch, PoolLocked("pool 'a' is locked\n  do:    wait"))
    assert result.stderr == "PoolLocked: pool 'a' is locked\n  do:    wait\n"
    assert result.stdout == ""


def test_traceback_is_shown_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    error = PoolLocked("no")
    assert run_raising(monkeypatch, error, "--traceback").exception is error


def test_a_fault_of_ours_is_not_dressed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    error = RuntimeError("bug")
    assert run_raising(monkeypatch, error).exception is error


def test_unknown_subcommand_is_wrong_use() -> None:
    result = run("trian")
    assert result.exit_code == 2
    assert "No such command 'trian'" in result.stderr


@pytest.mark.parametrize(
    "arguments", [["--help"], ["train", "--help"], ["train", "--show-config"], ["--version"]]
)
def test_answers_that_need_no_torch_come_at_once(arguments: list[str]) -> None:
    program = (
        "import sys\n"
        "from trainingcxl.cli import main\n"
        "try:\n"
        "    main(sys.argv[1:])\n"
        "except SystemExit as end:\n"
        "    print('code', end.code)\n"
        "print('torch' in sys.modules, 'rich' in sys.modules)\n"
    )
    begin = cpu_seconds_of_children()
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True
    )
    assert cpu_seconds_of_children() - begin < 1.0
    assert done.stdout.splitlines()[-2:] == ["code 0", "False False"]


def test_help_lists_every_subcommand() -> None:
    result = run("--help")
    assert result.exit_code == 0
    for name in ("train", "inspect", "verify", "demo", "schema", "simulate", "reproduce"):
        assert f"\n  {name} " in result.output


@pytest.mark.parametrize("name", program._SUBCOMMANDS)
def test_every_subcommand_can_be_run(name: str) -> None:
    result = run(name, "--help")
    assert result.exit_code == 0, result.output
    assert result.output.startswith(f"Usage: main {name}")


def test_flags_win_over_assignments_and_are_shown() -> None:
    result = run("train", "--set", "run.epochs=2", "--epochs", "3", "--show-config")
    assert "epochs = 3 " in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "run.treads=2"], "nearest is 'run.threads'"),
        (["--optimizer", "adam"], "rows.optimizer is 'adam', expected one of rowwise-adagrad"),
        (["--epochs", "two"], "'two' is not a valid integer"),
        (["--config", "absent.toml"], "'absent.toml' does not exist"),
    ],
)
def test_wrong_use_of_train_ends_with_two(arguments: list[str], message: str) -> None:
    result = run("train", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_lines_quote_what_is_not_one_word() -> None:
    stream = io.StringIO()
    LineReporter(stream).event("pool", path="a b", level="", rate=0.25, ok=True, none=None)
    assert stream.getvalue() == 'event=pool path="a b" level="" rate=0.25 ok=true none=none\n'


def test_json_lines_hold_numbers_only_where_they_are_finite() -> None:
    stream = io.StringIO()
    JsonReporter(stream).event("evaluation", auc=float("nan"), loss=0.5)
    assert json.loads(stream.getvalue()) == {"event": "evaluation", "auc": None, "loss": 0.5}


def test_lines_of_progress_are_few_and_include_the_last() -> None:
    stream = io.StringIO()
    reporter = LineReporter(stream)
    for done in range(1, 1001):
        reporter.progress("train", done, 1000)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2
    assert "done=1000" in lines[-1]


def test_signal_outside_deferred_stops_at_once() -> None:
    with StopSignals(), pytest.raises(Interrupted) as caught:
        signal.raise_signal(signal.SIGTERM)
    assert caught.value.exit_code == 143


def test_signal_inside_deferred_waits_for_the_end_of_the_block() -> None:
    reached = []

    def work(stop: StopSignals) -> None:
        with stop.deferred():
            signal.raise_signal(signal.SIGINT)
            assert stop.requested
            reached.append("end of block")
        reached.append("after it")

    with StopSignals() as stop, pytest.raises(Interrupted):
        work(stop)
    assert reached == ["end of block"]


def test_second_signal_does_not_wait() -> None:
    reached = []

    def work(stop: StopSignals) -> None:
        with stop.deferred():
            signal.raise_signal(signal.SIGINT)
            reached.append("after the first")
            signal.raise_signal(signal.SIGINT)
            reached.append("after the second")

    with StopSignals() as stop, pytest.raises(Interrupted):
        work(stop)
    assert reached == ["after the first"]


def test_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopSignals():
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.fixture
def pool_path(tmp_path: Path) -> Path:
    """A pool with one table, closed."""
    path = tmp_path / "test.pool"
    with Pool(path) as pool:
        pool.create_tables(
            [
                TableSpec(
                    name="user",
                    num_embeddings=100,
                    embedding_dim=4,
                    optimizer="rowwise-adagrad",
                    init_scale=0.1,
                    init_seed=0,
                )
            ]
        )
    return path


def test_inspect_as_json_has_the_promised_keys(pool_path: Path) -> None:
    found = json.loads(run("inspect", str(pool_path), "--json", "--digest").stdout)
    promised = (
        "path uuid medium page_bytes durability committed_batch durable_batch epoch position "
        "finished horizon_batches tables log_bytes log_used_bytes digest"
    )
    assert set(promised.split()) <= set(found)
    assert found["tables"][0]["num_embeddings"] == 100
    assert len(found["digest"]) == 64


def test_inspect_for_the_eye_shows_the_same(pool_path: Path) -> None:
    as_json = json.loads(run("inspect", str(pool_path), "--json").stdout)
    shown = run("inspect", str(pool_path)).stdout
    assert f"uuid              {as_json['uuid']}\n" in shown
    assert "  name=user num_embeddings=100 embedding_dim=4" in shown


def test_inspect_with_digest_prints_its_speed(pool_path: Path) -> None:
    assert "GB/s" in run("inspect", str(pool_path), "--digest").stdout


def test_verify_of_a_sound_pool(pool_path: Path) -> None:
    result = run("verify", str(pool_path))
    assert result.exit_code == 0
    assert result.stdout.startswith(f"{pool_path}: no damage found\n")


def test_verify_ends_with_three_on_damage(pool_path: Path) -> None:
    log = bytearray((pool_path / "log").read_bytes())
    log[64] ^= 1
    (pool_path / "log").write_bytes(log)
    result = run("verify", str(pool_path))
    assert result.exit_code == 3
    assert "damage" in result.stdout
    as_json = run("verify", str(pool_path), "--json")
    assert as_json.exit_code == 3
    assert json.loads(as_json.stdout)["damage"][0]["what"]


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_no_pool_is_a_failure_that_names_the_path(command: str, tmp_path: Path) -> None:
    result = run(command, str(tmp_path / "absent.pool"))
    assert result.exit_code == 1
    assert "absent.pool" in result.stderr


def test_terminal_reporter_draws_bars_and_prints_events(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    with make_reporter(as_json=False) as reporter:
        reporter.event("evaluation", auc=0.75, note="[not markup]")
        reporter.progress("train", 1, 4, loss=0.5)
        reporter.progress("train", 4, 4, loss=0.25, committed_batch=7, durable_batch=None)
    shown = terminal.getvalue()
    assert 'evaluation  auc=0.75 note="[not markup]"' in shown
    assert "loss 0.25  committed 7" in shown
    assert "durable" not in shown
    assert "100%" in shown
