"""Useful batches an hour under failures: ours, and checkpoints every N batches at their best N.

    python benchmarks/goodput.py FOLDER [--gib 1] [--seconds 90] [--kill-every 25] [--out OUT]

Peers train the same DLRM with nn.EmbeddingBag(sparse=True) and torch.optim and save all of it with
torch.save + fsync, DCP async_save, or torchsnapshot.Snapshot.take (where installed, make
bench-peers; its async_take is tried for consistency and not compared).

1. Costs: a step of each trainer, in turns; what a save blocks, when it is durable, how much it
   slows the steps meanwhile, and what a restore takes.
2. Short runs, measured: each method trains for --seconds while it is killed (SIGKILL) every
   --kill-every; what counts are the batches that its last state has, over the time. Each saves at
   the best N for that rate.
3. Long runs, modelled from the costs for mean times between failures M of minutes to a day:

     interval = N * step, cost = blocked + slowed steps, lost = interval / 2 + time to durable
     goodput = interval / (interval + cost) * (M - lost) / (M + restart + restore)

   at the N that makes it greatest (Young and Daly's optimum, found by search: a save must also have
   ended before the next begins). Ours: cost is that of the log in the step, lost is what an exact
   resume does again. `restart`, the time to notice and start again, is the same for all (--restart
   60).

Writes goodput.json, goodput.png and a table to OUT.
"""

import argparse
import json
import math
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from goodput_trainers import DIM, TABLES, Ours, Peer, import_torchsnapshot, make

METHODS = ("ours", "torch.save", "DCP async_save", "torchsnapshot take")
MTBF_S = (600.0, 1800.0, 3600.0, 4 * 3600.0, 24 * 3600.0)


@dataclass
class Costs:
    """Seconds that a method costs; zero where it has no such cost."""

    step_s: float
    bare_step_s: float
    blocked_s: float = 0.0
    durable_s: float = 0.0
    slowed_s: float = 0.0
    restore_s: float = 0.0
    redone_batches: float = 0.0


# --- costs


def timed(call: Callable[[], object]) -> float:
    """Seconds of a call."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def median_step(trainer: Any, count: int) -> float:
    """Seconds, after a few to warm up."""
    for _ in range(3):
        trainer.step()
    return statistics.median(timed(trainer.step) for _ in range(count))


def steps_in_turns(folder: Path, rows: int, count: int) -> dict[str, float]:
    """Seconds a step of ours with and without its log and of torch's, medians of rounds."""
    trainers = {
        "ours": Ours(folder / "ours", rows),
        "bare": Ours(folder / "bare", rows, has_log=False),
        "torch": Peer(folder / "torch", rows, method="torch.save", every=1 << 40),
    }
    rounds: dict[str, list[float]] = {name: [] for name in trainers}
    for _ in range(4):
        for name, trainer in trainers.items():
            rounds[name].append(median_step(trainer, count))
    for name in ("ours", "bare"):
        trainers[name].pool.core.close(False)  # as a kill leaves it
    return {name: statistics.median(values[1:]) for name, values in rounds.items()}


def costs_of_ours(folder: Path, rows: int, steps: dict[str, float]) -> Costs:
    """Of a resume after a trainer that was not closed, and what it does again."""
    begin = time.perf_counter()
    trainer = Ours(folder / "ours", rows)
    restore = time.perf_counter() - begin
    every = trainer.run.dense_every
    trainer.pool.close()
    return Costs(
        step_s=steps["ours"],
        bare_step_s=steps["bare"],
        restore_s=restore,
        redone_batches=every,  # between 0 and 2 K - 1 of them
    )


def costs_of_peer(method: str, folder: Path, rows: int, step: float) -> Costs:
    """A save, with steps meanwhile if it lets any, then a restore."""
    trainer = Peer(folder / method.replace(" ", "-"), rows, method=method, every=1 << 40)
    for _ in range(2):
        trainer.step()
    trainer.save()  # the first makes buffers
    if trainer.pending:
        trainer.finish()
    started = time.perf_counter()
    trainer.save()
    blocked = time.perf_counter() - started
    slowed = 0.0
    if trainer.pending:
        while not trainer.pending[0].done():
            slowed += max(0.0, timed(trainer.step) - step)
        trainer.finish()
    durable = time.perf_counter() - started
    return Costs(
        step_s=step,
        bare_step_s=step,
        blocked_s=blocked,
        durable_s=durable,
        slowed_s=slowed,
        restore_s=timed(trainer.restore),
    )


def is_async_take_consistent(folder: Path) -> bool | None:
    """Whether torchsnapshot's async_take saved the values at the call; None: not installed."""
    try:
        torchsnapshot = import_torchsnapshot()
    except ImportError:
        return None
    tensors = {f"t{k}": torch.zeros(1 << 22) for k in range(16)}
    pending = torchsnapshot.Snapshot.async_take(
        str(folder / "async"), {"all": torchsnapshot.StateDict(**tensors)}
    )
    for tensor in tensors.values():
        tensor.fill_(1.0)  # the next training step
    pending.wait()
    saved = torchsnapshot.StateDict(**{k: torch.empty(1 << 22) for k in tensors})
    torchsnapshot.Snapshot(str(folder / "async")).restore({"all": saved})
    return all(bool((saved[name] == 0.0).all()) for name in tensors)


# --- model


def goodput(costs: Costs, every: int, mtbf_s: float, restart_s: float) -> float:
    """Useful batches an hour when saved every so many batches."""
    if costs.redone_batches:
        interval, cost, lost = costs.step_s, 0.0, costs.redone_batches * costs.step_s
    else:
        interval = every * costs.step_s
        cost = costs.blocked_s + costs.slowed_s
        lost = interval / 2 + max(costs.durable_s, cost)
    up = max(0.0, mtbf_s - lost) / (mtbf_s + restart_s + costs.restore_s)
    return 3600 / costs.step_s * interval / (interval + cost) * up


def best_every(costs: Costs, mtbf_s: float, restart_s: float) -> int:
    """The number of batches between saves that makes goodput greatest."""
    if costs.redone_batches:
        return 1
    least = max(1, math.ceil((costs.durable_s - costs.blocked_s) / costs.step_s))
    candidates = {least, *(math.ceil(least * 1.05**k) for k in range(400))}
    return max(candidates, key=lambda n: goodput(costs, n, mtbf_s, restart_s))


# --- short runs


def child(method: str, folder: Path, rows: int, every: int) -> None:
    """Trains until it is killed; tells each batch that its folder would resume with."""
    trainer = make(method, folder, rows, every)
    print(json.dumps({"resumed": trainer.batch}), flush=True)
    while True:
        trainer.step()
        trainer.save_if_due()
        print(json.dumps({"batch": trainer.batch}), flush=True)


def short_run(method: str, folder: Path, args: argparse.Namespace, every: int) -> dict[str, Any]:
    """Kills children at fixed times after their start; what the last state holds at the end."""
    command = [sys.executable, __file__, str(folder), "--child", method]
    command += ["--rows", str(args.rows), "--every", str(every)]
    started, kills, resumed, trained = time.monotonic(), 0, [], 0
    while time.monotonic() - started < args.seconds:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        dies_at = time.monotonic() + args.kill_every
        try:
            for line in process.stdout:
                told = json.loads(line)
                if "resumed" in told:
                    resumed.append(told["resumed"])
                trained = told.get("batch", trained)
                if time.monotonic() >= dies_at:
                    break
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
        kills += 1
    elapsed = time.monotonic() - started
    useful = make(method, folder, args.rows, every).batch
    return {
        "every": every,
        "kills": kills,
        "useful_batches": useful,
        "lost_at_the_last_kill": trained - useful,
        "useful_batches_an_hour": 3600 * useful / elapsed,
    }


# --- all of it


def table(found: dict[str, Any]) -> str:
    """Markdown: a line a mean time between failures, a column a method; best N in brackets."""
    names = list(found["costs"])
    lines = ["| failure every | " + " | ".join(names) + " |", "|---|" + "---|" * len(names)]
    for row in found["model"]:
        cells = [f"{row[name]['an_hour']:,.0f} ({row[name]['every']})" for name in names]
        lines.append(f"| {row['mtbf_s'] / 3600:g} h | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plot(found: dict[str, Any], path: Path) -> None:
    """Goodput over mean time between failures."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for name in found["costs"]:
        values = [row[name]["an_hour"] for row in found["model"]]
        axes.plot([row["mtbf_s"] / 3600 for row in found["model"]], values, marker="o", label=name)
    axes.set_xscale("log")
    axes.set_xlabel("hours between failures")
    axes.set_ylabel("useful batches an hour")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Costs, short runs, model."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gib", type=float, default=1.0, help="of tables")
    parser.add_argument("--steps", type=int, default=20, help="steps a median is taken of")
    parser.add_argument("--seconds", type=float, default=90.0, help="of each short run; 0: none")
    parser.add_argument("--kill-every", type=float, default=25.0)
    parser.add_argument("--restart", type=float, default=60.0, help="seconds, in the model")
    parser.add_argument("--out", type=Path, default=Path("build/bench/goodput"))
    parser.add_argument("--child", choices=METHODS, help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--every", type=int, default=1, help=argparse.SUPPRESS)
    args = parser.parse_args()
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    if args.child:
        child(args.child, args.folder, args.rows, args.every)
    args.rows = int(args.gib * 2**30 / TABLES / DIM / 4)
    found: dict[str, Any] = {"table_bytes": 4 * args.rows * TABLES * DIM, "skipped": {}}
    with _scratch(args.folder) as folder:
        steps = steps_in_turns(folder, args.rows, args.steps)
        costs = {"ours": costs_of_ours(folder, args.rows, steps)}
        for method in METHODS[1:]:
            try:
                costs[method] = costs_of_peer(method, folder, args.rows, steps["torch"])
            except ImportError as error:
                found["skipped"][method] = str(error)
        found["torchsnapshot_async_take_is_consistent"] = is_async_take_consistent(folder)
    found["costs"] = {name: asdict(one) for name, one in costs.items()}
    for name, one in found["costs"].items():
        print(name, {key: round(value, 4) for key, value in one.items()}, flush=True)
    found["model"] = [
        {"mtbf_s": mtbf}
        | {
            name: {
                "every": (every := best_every(one, mtbf, args.restart)),
                "an_hour": goodput(one, every, mtbf, args.restart),
            }
            for name, one in costs.items()
        }
        for mtbf in MTBF_S
    ]
    found["short"] = {}
    for name, one in costs.items():
        if args.seconds <= 0:
            break
        with _scratch(args.folder) as folder:
            every = best_every(one, args.kill_every, 5.0)
            found["short"][name] = short_run(name, folder / "run", args, every)
        print(f"short run, {name}: {found['short'][name]}", flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "goodput.json").write_text(json.dumps(found, indent=1))
    plot(found, args.out / "goodput.png")
    print("\nuseful batches an hour, modelled (batches between saves):\n" + table(found))
    if found["torchsnapshot_async_take_is_consistent"] is False:
        print("torchsnapshot's async_take saved values of after the call: not compared")


@contextmanager
def _scratch(parent: Path) -> Iterator[Path]:
    """A folder that goes with the scope."""
    parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=parent, prefix="tcxl-goodput-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
