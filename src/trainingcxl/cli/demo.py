"""`trainingcxl demo`: train, kill, resume, and compare with a training that was left alone."""

import json
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

from trainingcxl.cli.reporters import Reporter, make_reporter
from trainingcxl.cli.signals import StopSignals
from trainingcxl.cli.train import let_threads_sleep
from trainingcxl.config import Settings, load_settings
from trainingcxl.errors import TrainingCXLError

__all__ = ["command"]

_BATCH_SIZE, _NUM_BATCHES, _HELD_OUT = 1024, 100, 0.1
_COST_BATCHES, _COST_ROUNDS = 25, 3
_SHOWN = ("recovery", "evaluation", "result", "stopped")


@click.command("demo")
@click.option("--dir", "folder", type=click.Path(path_type=Path), help="Where to put the pools.")
def command(folder: Path | None) -> None:
    """Train on built-in data, kill the training half-way with SIGKILL, resume, and compare.

    A second training with the same settings is left alone. Both must end with the same bits: the
    exit code is 1 if they do not. The pools are kept, to be looked at.
    """
    from trainingcxl.pool import Pool, inspect

    let_threads_sleep()
    folder = folder or Path(tempfile.mkdtemp(prefix="trainingcxl-demo-"))
    folder.mkdir(parents=True, exist_ok=True)
    alone, killed = folder / "left-alone.pool", folder / "killed.pool"
    for pool in (alone, killed):
        Pool.discard(pool)
    with StopSignals(), make_reporter(as_json=False) as report:
        report.event("step", number=1, doing="train a DLRM and leave it alone", pool=str(alone))
        left_alone = _train(alone, report)
        report.event("step", number=2, doing="train it again, kill it half-way", pool=str(killed))
        _train(killed, report, kill_at=_NUM_BATCHES // 2)
        report.event("step", number=3, doing="the same command again: resume", pool=str(killed))
        resumed = _train(killed, report)
        report.event("step", number=4, doing="train with and without log: what durability costs")
        cost = _durability_cost(folder / "cost.pool", report)
    _print_training(left_alone["result"], cost)
    digests = [inspect(pool, digest=True) for pool in (killed, alone)]
    _print_comparison(resumed["recovery"], *digests)
    if digests[0]["digest"] != digests[1]["digest"]:
        raise TrainingCXLError(
            "the resumed training differs from the one that was left alone\n"
            f"  where: pools {str(killed)!r} and {str(alone)!r}\n"
            "  do:    report it, with both pools"
        )


def _assignments(pool: Path) -> list[str]:
    samples = round(_BATCH_SIZE * _NUM_BATCHES / (1 - _HELD_OUT))
    return [
        f"pool.path={pool}",
        f"data.source=synthetic:small?samples={samples}",
        f"run.batch_size={_BATCH_SIZE}",
        f"eval.fraction={_HELD_OUT}",
    ]


def _train(pool: Path, report: Reporter, *, kill_at: int | None = None) -> dict[str, Any]:
    """Run `trainingcxl train` in a process of its own and pass on what it says.

    Args:
        pool: The pool to train in.
        report: Told of the progress and the main events of the process.
        kill_at: Batch after whose commit the process is killed with SIGKILL; None lets it end.

    Returns:
        The last event of each name.

    Raises:
        TrainingCXLError: It failed, or ended before it could be killed.
    """
    options = [option for text in _assignments(pool) for option in ("--set", text)]
    arguments = [sys.executable, "-m", "trainingcxl", "train", "--json", *options]
    events: dict[str, Any] = {}
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                event = json.loads(line)
                events[event["event"]] = event
                _pass_on(dict(event), pool, report)
                if kill_at is not None and event.get("committed_batch", 0) >= kill_at:
                    process.kill()
        finally:
            if process.poll() is None and sys.exc_info()[0] is not None:
                process.kill()  # the demo itself was stopped
        process.wait()
    wanted = 0 if kill_at is None else -signal.SIGKILL
    if process.returncode != wanted:
        raise TrainingCXLError(
            f"'{' '.join(arguments)}' ended with {process.returncode}, expected {wanted}\n"
            f"  where: pool {str(pool)!r}\n"
            "  do:    run it by itself to see why"
        )
    return events


def _pass_on(event: dict[str, Any], pool: Path, report: Reporter) -> None:
    name = event.pop("event")
    if name == "progress":
        work = f"{event.pop('work')} {pool.stem}"
        report.progress(work, event.pop("done"), event.pop("total"), **event)
    elif name in _SHOWN:
        report.event(name, **event)


def _durability_cost(path: Path, report: Reporter) -> float:
    """Train short runs with everything durable and with no log at all, in turn.

    Returns:
        What durability adds to the time of a batch, as a share; the median of the rounds.
    """
    settings = load_settings(assignments=_assignments(path))
    rounds = []
    for number in range(_COST_ROUNDS):
        durable, bare = (_seconds_per_batch(settings, has_log=has_log) for has_log in (True, False))
        rounds.append(durable / bare - 1)
        report.progress("measure", number + 1, _COST_ROUNDS)
    return statistics.median(rounds)


def _seconds_per_batch(settings: Settings, *, has_log: bool) -> float:
    from trainingcxl.data import open_data
    from trainingcxl.pool import Pool
    from trainingcxl.train import Training
    from trainingcxl.train_setup import Silent, prepare_torch

    device = prepare_torch(settings.run)
    never = 1000  # the largest number that is allowed
    settings = settings.with_values(
        {
            "data.source": f"synthetic:small?samples={_BATCH_SIZE * _COST_BATCHES}",
            "eval.fraction": 0,
            "run.dense_every": settings.run.dense_every if has_log else never,
        }
    )
    silent = Silent()
    path = settings.pool.path
    try:
        with Pool(path, _log=has_log) as pool:
            data = open_data(settings.data.source)
            training = Training(settings, data, pool, device, silent, silent)
            training.go_on()
            return training.pace.seconds / _COST_BATCHES
    finally:
        Pool.discard(path)


def _print_training(result: dict[str, Any], cost: float) -> None:
    click.echo(
        f"\ntrained {_NUM_BATCHES} batches of {_BATCH_SIZE}: log loss {result['log_loss']:.4f}, "
        f"AUC {result['auc']:.4f} on held-out samples, "
        f"{result['samples_per_second']:.0f} samples/s\n"
        f"durability (level process, every batch) adds {cost:+.1%} to the time of a batch\n"
    )


def _print_comparison(
    recovery: dict[str, Any], killed: dict[str, Any], alone: dict[str, Any]
) -> None:
    rows = [
        ("", "killed and resumed", "left alone"),
        ("pool", killed["path"], alone["path"]),
        ("uuid", killed["uuid"], alone["uuid"]),
        ("batch at the kill", recovery["committed_batch"], "-"),
        ("rows rolled back", recovery["rows_rolled_back"], "-"),
        ("batches redone", recovery["batches_to_redo"], "-"),
        ("digest", killed["digest"], alone["digest"]),
    ]
    widths = [max(len(str(row[column])) for row in rows) for column in range(3)]
    for row in rows:
        click.echo("  ".join(f"{text!s:<{width}}" for text, width in zip(row, widths, strict=True)))
    same = killed["digest"] == alone["digest"]
    click.echo(f"\nthe two trainings ended {'with the same bits' if same else 'DIFFERENTLY'}")
