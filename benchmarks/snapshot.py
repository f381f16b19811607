"""What snapshots cost a training: the DLRM step with one snapshot after the other, and none.

    python benchmarks/snapshot.py FOLDER [--rounds 9] [--threads 2] [--steps 20] [--json FILE]

Rounds with and without are interleaved in one training; medians, ratios within a round.
"""

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from levels import parse_options
from step import SHAPES, Dlrm, draw_batches, summarize
from step import _Batch as Batch

from trainingcxl.pool import Snapshot


def main() -> None:
    """Trains, prints and writes the figures."""
    args = parse_options(__doc__.splitlines()[0], "where pool and snapshots go")
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
    taken, completed = 0, 0
    running: Snapshot | None = None
    for round_number in range(args.rounds + 1):
        for key, values in times.items():
            seconds = 0.0
            for _ in range(args.steps):
                if key == "snapshots" and (running is None or running.is_done):
                    completed += running is not None
                    shutil.rmtree(folder / f"copy{taken}", ignore_errors=True)
                    taken += 1
                    running = model.pool.snapshot(folder / f"copy{taken}", wait=False)
                seconds += model.loop(batches, 1)
            if round_number > 0:
                values.append(1000 * seconds / args.steps)
            if running is not None:
                running.wait()
    result = summarize(f"DLRM {args.shape} zipf", times, reference="none")
    result |= {"snapshots_begun": taken, "completed_in_time": completed}
    print(f"  {taken} snapshots begun")
    model.pool.close()
    return result


if __name__ == "__main__":
    main()
