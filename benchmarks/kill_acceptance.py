"""Kills `trainingcxl train` on real clicks, 20 times after a commit and 5 times before one.

    python benchmarks/kill_acceptance.py FOLDER --data criteo:train.ranked.part10.tsv.gz

Prints one line a kill: the committed batch that the next life found, the undo records it rolled
back, the batches it had to train again. Exits with 1 if the end of a killed run has other bits than
the run that was left alone, or if too little was hit.
"""

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

_KILLS_AFTER_COMMIT, _KILLS_BEFORE = 20, 5
_SECONDS_PER_BATCH = 0.0015  # of a fast machine: a run must not end before its kills
_DISTINCT_MIN, _ROLLED_BACK_MIN, _BATCHES_MIN = 12, 6, 2000
# A life that dies at a crash point (csrc/crash_point.h) instead of after a time.
_DYING = (
    "import sys; from trainingcxl import _core; _core.kill_at_persist(int(sys.argv.pop(1)));"
    "from trainingcxl.cli import main; main()"
)


@dataclass
class Run:
    """One training, over all its lives."""

    name: str
    pool: Path
    options: list[str]
    redone_max: int
    kills: list[dict[str, Any]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    digest: str = ""
    batches: int = 0
    reached: int = 0

    def start(self, crash_point: int = 0) -> "subprocess.Popen[str]":
        """Starts a life; with `crash_point` it kills itself there."""
        dying = ["-c", _DYING, str(crash_point)] if crash_point else ["-m", "trainingcxl"]
        command = [sys.executable, *dying, "train", "--json", "--pool", str(self.pool)]
        command += ["--dense-gemm", "mkl"]  # two runs, each measuring, might choose differently
        return subprocess.Popen([*command, *self.options], stdout=subprocess.PIPE, text=True)

    def events(self, life: "subprocess.Popen[str]") -> Iterator[dict[str, Any]]:
        """What a life says; takes note of what it recovered."""
        assert life.stdout is not None
        for line in life.stdout:
            try:
                event = json.loads(line)
            except json.JSONDecodeError:
                continue  # cut off by a kill
            if event["event"] == "recovery":
                self._found(event)
            yield event

    def _found(self, recovery: dict[str, Any]) -> None:
        found, redone = recovery["committed_batch"], recovery["batches_to_redo"]
        # A life that died in recovery said nothing: what it found is what the next one finds.
        for kill in reversed(self.kills):
            if "found" in kill or kill["when"].startswith("creation"):
                break
            kill.update(found=found, rolled_back=recovery["rows_rolled_back"], redone=redone)
        if redone > self.redone_max:
            self.failures.append(f"{redone} batches redone, at most {self.redone_max} expected")

    def finish(self) -> None:
        """Lets the last life train to the end."""
        life = self.start()
        for event in self.events(life):
            self.batches = event.get("committed_batch") or self.batches
        if life.wait() != 0:
            self.failures.append(f"the last life ended with {life.returncode}")
        self.digest = _digest(self.pool)

    def kill_before_commit(self, crash_point: int, what: str) -> None:
        """A life that dies in creation or in recovery."""
        life = self.start(crash_point)
        self.kills.append({"when": f"{what}, crash point {crash_point}"})
        for _ in self.events(life):
            pass
        if life.wait() != -signal.SIGKILL:
            self.failures.append(f"a life that should die in {what} ended with {life.returncode}")

    def kill_after_commit(self, choose: random.Random, batches: int) -> None:
        """A life that is killed after its first commit, some `batches` later at most."""
        life = self.start()
        first = None
        for event in self.events(life):
            committed = event.get("committed_batch")
            if event["event"] != "progress" or event["work"] != "train" or committed is None:
                continue
            first = committed
            time.sleep(choose.random() * _SECONDS_PER_BATCH * batches)
            break
        life.kill()
        life.wait()
        assert life.stdout is not None
        life.stdout.close()
        if first is None:
            self.failures.append("a life ended before its first commit")
        self.reached = first or self.reached
        self.kills.append({"when": f"after batch {first} or later"})


def _digest(pool: Path) -> str:
    command = [sys.executable, "-m", "trainingcxl", "inspect", str(pool), "--digest", "--json"]
    return str(json.loads(subprocess.check_output(command, text=True))["digest"])


def _discard(pool: Path) -> None:
    """Cached data stays: converting it is not what is measured."""
    for name in ("log", "data", "lock"):
        (pool / name).unlink(missing_ok=True)


def _torture(run: Run, seed: int, batches: int) -> None:
    choose = random.Random(seed)
    for crash_point in (4, 11):
        run.kill_before_commit(crash_point, "creation")
    for number in range(_KILLS_AFTER_COMMIT):
        lives_left = _KILLS_AFTER_COMMIT - number + 2
        run.kill_after_commit(choose, (batches - run.reached) // lives_left)
        if number % 6 == 3:
            run.kill_before_commit(choose.randint(2, 9), "recovery")
    run.finish()


def _check(run: Run, alone: Run) -> None:
    committed = [kill for kill in run.kills if kill["when"].startswith("after")]
    found = [kill for kill in run.kills if "found" in kill]
    distinct = len({kill["found"] for kill in found})
    rolled_back = sum(kill["rolled_back"] > 0 for kill in found)
    for what, value, least in (
        ("kills after a commit", len(committed), _KILLS_AFTER_COMMIT),
        ("kills in creation or recovery", len(run.kills) - len(committed), _KILLS_BEFORE),
        ("distinct batches", distinct, _DISTINCT_MIN),
        ("kills with rows rolled back", rolled_back, _ROLLED_BACK_MIN),
        ("batches", run.batches, _BATCHES_MIN),
    ):
        print(f"  {what}: {value} (at least {least})")
        if value < least:
            run.failures.append(f"{what}: {value}, at least {least} wanted")
    print(f"  batches redone at most: {max(kill['redone'] for kill in found)}")
    print(f"  digest {run.digest}\n  alone  {alone.digest}", flush=True)
    if run.digest != alone.digest:
        run.failures.append("the end has other bits than that of the run left alone")


def _show(run: Run) -> None:
    print(f"{run.name}")
    for number, kill in enumerate(run.kills, 1):
        found = {name: kill.get(name, "-") for name in ("found", "rolled_back", "redone")}
        print(
            f"  kill {number:2} {kill['when']:32} found batch {found['found']!s:>5}"
            f"  rows rolled back {found['rolled_back']!s:>6}  batches redone {found['redone']!s:>3}"
        )


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@click.option("--data", required=True, help="As for trainingcxl train.")
@click.option("--epochs", default=6, show_default=True)
@click.option("--batch-size", default=16, show_default=True)
@click.option("--seed", default=0, show_default=True, help="Of the moments of the kills.")
@click.option("--only", default="", help="Only runs whose name has this word.")
def main(folder: Path, data: str, epochs: int, batch_size: int, seed: int, only: str) -> None:
    """Run the acceptance of the main job in FOLDER."""
    folder.mkdir(parents=True, exist_ok=True)
    every_run = ["--data", data, "--epochs", str(epochs), "--batch-size", str(batch_size)]
    every_run += ["--set", "eval.fraction=0.2", "--set", f"cache.dir={folder / 'cache'}"]
    small = ["--set", "model.bottom=64", "--set", "model.top=64"]

    def make(name: str, pool: str, redone_max: int, threads: int, dense_every: int) -> Run:
        _discard(folder / pool)
        options = [*every_run, *small, "--threads", str(threads), "--dense-every", str(dense_every)]
        return Run(name, folder / pool, options, redone_max)

    alone = make("left alone", "alone.pool", 0, 2, 1)
    began = time.monotonic()
    alone.finish()
    seconds = time.monotonic() - began
    print(f"left alone: {alone.batches} batches in {seconds:.0f} s", flush=True)
    runs = [
        make("killed, dense_every 1", "one.pool", 1, 2, 1),
        make("killed, dense_every 1, another number of threads", "threads.pool", 1, 1, 1),
        make("killed, dense_every 50", "fifty.pool", 100, 2, 50),
    ]
    failures = list(alone.failures)
    for run in (run for run in runs if only in run.name):
        _torture(run, seed, alone.batches)
        _show(run)
        _check(run, alone)
        failures += [f"{run.name}: {text}" for text in run.failures]
        shutil.rmtree(run.pool, ignore_errors=True)
    for text in failures:
        print(f"FAILED {text}")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
