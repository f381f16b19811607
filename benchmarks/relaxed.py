"""Strict against relaxed lookup: time of a DLRM step, and the share of lookups to correct.

    python benchmarks/relaxed.py [--shapes iii16,i] [--recurrence 0.3,0.6,0.8,0.95] [--rounds 9]
    [--threads 2] [--dir DIR] [--json FILE]

A batch takes the given share of its lookups from the rows of the batch before, the rest from all
rows. Candidates take turns in one process, the first round is left out, medians.
"""

import argparse
import json
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from step import SHAPES, Dlrm, _Batch

import trainingcxl as tcxl

COUNT = 8  # steps a round


def draw(shape: dict[str, Any], count: int, *, recurrence: float) -> list[tcxl.SparseFeatures]:
    """Batches of which each repeats rows of the one before; the first repeats some of the last."""
    rng = np.random.default_rng(0)
    num = shape["batch"] * shape["lookups"]
    keys = [f"f{t}" for t in range(len(shape["rows"]))]
    offsets = torch.arange(0, num * len(keys) + 1, shape["lookups"])
    before = [rng.integers(0, rows, num) for rows in shape["rows"]]
    batches = []
    for _ in range(count):
        now = []
        for rows, last in zip(shape["rows"], before, strict=True):
            fresh = rng.integers(0, rows, num)
            repeats = rng.random(num) < recurrence
            now.append(np.where(repeats, rng.choice(last, num), fresh))
        batches.append(
            tcxl.SparseFeatures(keys, torch.from_numpy(np.concatenate(now)), offsets=offsets)
        )
        before = now
    return batches


def compare(name: str, recurrence: float, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Milliseconds a step of both, interleaved."""
    shape = SHAPES[name]
    drawn = draw(shape, COUNT, recurrence=recurrence)
    batches = [_Batch(sparse, shape["batch"], k) for k, sparse in enumerate(drawn)]
    models = {
        lookup: Dlrm(
            folder / lookup,
            shape,
            threads=args.threads,
            undo_log="auto",
            dense_every="auto",
            lookup=lookup,
        )
        for lookup in ("strict", "relaxed")
    }
    times: dict[str, list[float]] = {key: [] for key in models}
    for round_number in range(args.rounds + 1):
        for key, model in models.items():
            seconds = model.loop(batches, COUNT)
            if round_number > 0:
                times[key].append(1000 * seconds / COUNT)
    stats = models["relaxed"].run.stats
    for model in models.values():
        model.pool.close()
    ratios = [s / r for s, r in zip(times["strict"], times["relaxed"], strict=True)]
    return {
        "shape": name,
        "recurrence": recurrence,
        "strict_ms": statistics.median(times["strict"]),
        "relaxed_ms": statistics.median(times["relaxed"]),
        "strict_over_relaxed": statistics.median(ratios),
        "corrected_share": stats.corrected_lookups / stats.lookups,
        "late_lookups": stats.late_lookups,
        "early_wait_share": stats.early_wait_s / stats.step_s,
    }


def main() -> None:
    """Prints a line for each shape and recurrence."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", default="iii16,i")
    parser.add_argument("--recurrence", default="0.3,0.6,0.8,0.95")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dir", default="/dev/shm")
    parser.add_argument("--json", help="write the figures to this file")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    results = []
    for name in args.shapes.split(","):
        for recurrence in map(float, args.recurrence.split(",")):
            folder = Path(tempfile.mkdtemp(dir=args.dir, prefix="tcxl-bench-"))
            try:
                found = compare(name, recurrence, args, folder)
            finally:
                shutil.rmtree(folder)
            print(
                f"{name:6s} recurrence {recurrence:4.2f}: strict {found['strict_ms']:7.2f} ms, "
                f"relaxed {found['relaxed_ms']:7.2f} ms, {found['strict_over_relaxed']:.2f}x; "
                f"{found['corrected_share']:.0%} of the lookups corrected, "
                f"{found['early_wait_share']:.1%} of the step waits for early lookups",
                flush=True,
            )
            results.append(found)
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
