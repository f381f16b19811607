"""`trainingcxl demo`: train, kill, resume, and compare with a training that was left alone."""

import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import click

from trainingcxl.cli.reporters import Reporter, make_reporter
from trainingcxl.cli.signals import StopSignals
from trainingcxl.cli.train import let_threads_sleep
from trainingcxl.config import Settings, load_settings
from trainingcxl.errors import TrainingCXLError

__all__ = ["command"]

_BATCH_SIZE, _HELD_OUT = 1024, 0.1
_COST_ROUNDS = 5
_SHOWN = ("recovery", "evaluation", "result", "stopped")


@click.command("demo")
@click.option("--dir", "folder", type=click.Path(path_type=Path), help="Where to put the pools.")
@click.option("--batches", default=100, type=click.IntRange(min=10), help="Batches to train.")
def command(folder: Path | None, batches: int) -> None:
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
        left_alone = _train(alone, batches, report)
        report.event("step", number=2, doing="train it again, kill it half-way", pool=str(killed))
        _train(killed, batches, report, kill_at=batches // 2)
        report.event("step", number=3, doing="the same command again: resume", pool=str(killed))
        resumed = _train(killed, batches, report)
        report.event("step", number=4, doing="train with and without log: what durability costs")
        costs = _durability_costs(folder / "cost.pool", batches // 4, report)
    _print_training(left_alone["result"], batches, costs)
    digests = [inspect(pool, digest=True) for pool in (killed, alone)]
    _print_comparison(resumed["recovery"], *digests)
    click.echo(f"\nthe pools stay in {folder}, to be looked at; remove them when you like")
    if digests[0]["digest"] != digests[1]["digest"]:
        raise TrainingCXLError(
            "the resumed training differs from the one that was left alone\n"
            f"  where: pools {str(killed)!r} and {str(alone)!r}\n"
            "  do:    report it, with both pools"
        )


def _assignments(pool: Path, batches: int) -> list[str]:
    samples = round(_BATCH_SIZE * batches / (1 - _HELD_OUT))
    return [
        f"pool.path={pool}",
        f"data.source=synthetic:small?samples={samples}",
        f"run.batch_size={_BATCH_SIZE}",
        f"eval.fraction={_HELD_OUT}",
    ]


def _train(
    pool: Path, batches: int, report: Reporter, *, kill_at: int | None = None
) -> dict[str, Any]:
    """Run `trainingcxl train` in a process of its own and pass on what it says.

    Args:
        pool: The pool to train in.
        batches: How many to train.
        report: Told of the progress and the main events of the process.
        kill_at: Batch after whose commit the process is killed with SIGKILL; None lets it end.

    Returns:
        The last event of each name.

    Raises:
        TrainingCXLError: It failed, or ended before it could be killed.
    """
    options = [option for text in _assignments(pool, batches) for option in ("--set", text)]
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


def _durability_costs(path: Path, batches: int, report: Reporter) -> list[float]:
    """Train short runs with everything durable and with no log at all, in turn.

    Returns:
        What durability adds to the median time of a batch, as a share, one figure a round.
    """
    settings = load_settings(assignments=_assignments(path, batches))
    rounds = []
    for number in range(_COST_ROUNDS):
        durable = _seconds_per_batch(settings, has_log=True)
        rounds.append(durable / _seconds_per_batch(settings, has_log=False) - 1)
        report.progress("compare", number + 1, _COST_ROUNDS)
    return rounds


def _seconds_per_batch(settings: Settings, *, has_log: bool) -> float:
    from trainingcxl.data import open_data
    from trainingcxl.pool import Pool
    from trainingcxl.train import Training
    from trainingcxl.train_setup import Silent, prepare_torch

    class Clock(Silent):
        def __init__(self) -> None:
            self.ticks: list[float] = []

        def progress(self, work: str, done: int, total: int, **values: Any) -> None:
            self.ticks.append(time.perf_counter())

    if not has_log:
        settings = settings.with_values({"run.dense_every": 1000})  # the largest number allowed
    device, clock = prepare_torch(settings.run), Clock()
    try:
        with Pool(settings.pool.path, _log=has_log) as pool:
            data = open_data(settings.data.source)
            Training(settings, data, pool, device, clock, clock).go_on()
        return statistics.median(end - begin for begin, end in pairwise(clock.ticks))
    finally:
        Pool.discard(settings.pool.path)


def _print_training(result: dict[str, Any], batches: int, costs: list[float]) -> None:
    click.echo(
        f"\ntrained {batches} batches of {_BATCH_SIZE}: log loss {result['log_loss']:.4f}, "
        f"AUC {result['auc']:.4f} on held-out samples, "
        f"{result['samples_per_second']:.0f} samples/s\n"
        f"every batch durable (level process): {statistics.median(costs):+.1%} time a batch "
        f"against training without any log ({min(costs):+.1%} to {max(costs):+.1%} in "
        f"{len(costs)} rounds); {result['durability_share']:.1%} of the step was spent on it\n"
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
        cells = [f"{text!s:<{width}}" for text, width in zip(row, widths, strict=True)]
        click.echo("  ".join(cells).rstrip())
    same = killed["digest"] == alone["digest"]
    click.echo(f"\nthe two trainings ended {'with the same bits' if same else 'DIFFERENTLY'}")
