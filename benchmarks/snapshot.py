"""What snapshots cost a training: the DLRM step with a snapshot a round, and with none.

    python benchmarks/snapshot.py FOLDER [--rounds 10] [--steps 200] [--back-to-back] [--json FILE]

By default ten snapshots in 2,000 commits; --back-to-back (--steps 20) begins the next as soon as
one is done: what they cost at most. Rounds with and without are interleaved in one training;
medians, ratios within a round. On a busy
machine trust what is counted: CPU time and page faults of the process in a round, time of the call
that begins a snapshot.
"""

import argparse
import json
import resource
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from step import SHAPES, Dlrm, draw_batches, summarize
from step import _Batch as Batch

from trainingcxl.pool import Snapshot


def main() -> None:
    """Trains, prints and writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where pool and snapshots go")
    parser.add_argument("--shape", default="iii16")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=200, help="of a round")
    parser.add_argument("--back-to-back", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    folder = Path(tempfile.mkdtemp(dir=args.folder, prefix="tcxl-snapshot-"))
    try:
        result = compare(folder, args)
    finally:
        shutil.rmtree(folder)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))


def compare(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """One training; every other round takes snapshots."""
    shape = SHAPES[args.shape]
    batches = [
        Batch(sparse, shape["batch"], k)
        for k, sparse in enumerate(draw_batches(shape, 32, zipf=True))
    ]
    model = Dlrm(folder / "pool", shape, threads=args.threads, undo_log="auto", dense_every="auto")
    times: dict[str, list[float]] = {"none": [], "snapshots": []}
    counted: dict[str, list[tuple[float, float, float]]] = {key: [] for key in times}
    begins = []
    taken, completed = 0, 0
    running: Snapshot | None = None
    for round_number in range(args.rounds + 1):
        for key, values in times.items():
            seconds, before = 0.0, _Counts()
            for step in range(args.steps):
                is_due = args.back_to_back or step == 0
                if key == "snapshots" and is_due and (running is None or running.is_done):
                    completed += running is not None
                    shutil.rmtree(folder / f"copy{taken}", ignore_errors=True)
                    taken += 1
                    began = time.perf_counter()
                    running = model.pool.snapshot(folder / f"copy{taken}", wait=False)
                    begins.append(1000 * (time.perf_counter() - began))
                seconds += model.loop(batches, 1)
            if round_number > 0:
                values.append(1000 * seconds / args.steps)
                counted[key].append(_Counts().since(before))
            if running is not None:
                running.wait()
    result = summarize(f"DLRM {args.shape} zipf", times, reference="none")
    result |= {"snapshots_begun": taken, "completed_in_time": completed}
    result["begin_ms"] = statistics.median(begins)
    print(f"  {taken} snapshots begun, each in {result['begin_ms']:.1f} ms of the trainer's time")
    for key, samples in counted.items():
        trainer, process, faults = (statistics.median(c) for c in zip(*samples, strict=True))
        result[f"counted_{key}"] = {"trainer_s": trainer, "process_s": process, "faults": faults}
        print(
            f"  {key}: CPU {trainer:.3f} s of the trainer's thread, {process:.3f} s of the "
            f"process; {faults:.0f} page faults"
        )
    model.pool.close()
    return result


class _Counts:
    def __init__(self) -> None:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        self.trainer, self.process = time.thread_time(), usage.ru_utime + usage.ru_stime
        self.faults = usage.ru_minflt

    def since(self, before: "_Counts") -> tuple[float, float, float]:
        """CPU seconds of the trainer's thread and of the process, page faults."""
        return (
            self.trainer - before.trainer,
            self.process - before.process,
            self.faults - before.faults,
        )


if __name__ == "__main__":
    main()
