"""What level `power` costs on an ordinary file: the DLRM step against level `process`, same disk.

    python benchmarks/power.py FOLDER [--rounds 9] [--threads 2] [--steps 20] [--json FILE]

FOLDER is on the disk to measure. Levels are interleaved in one process, one warm-up round, medians,
ratios within a round. Prints the step, how far `durable_batch` lagged behind, bytes written to the
journal for each batch against those of its distinct rows, and what the trainer waited for.
"""

import argparse
import json
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from levels import parse_options
from step import SHAPES, Dlrm, draw_batches, summarize
from step import _Batch as Batch

import trainingcxl as tcxl


def main() -> None:
    """Trains both, prints and writes the figures."""
    args = parse_options(__doc__.splitlines()[0], "on the disk to measure")
    shape = SHAPES[args.shape]
    batches = [
        Batch(sparse, shape["batch"], k)
        for k, sparse in enumerate(draw_batches(shape, 64, zipf=True))
    ]
    folder = Path(tempfile.mkdtemp(dir=args.folder, prefix="tcxl-power-"))
    try:
        result = compare(shape, batches, folder, args)
    finally:
        shutil.rmtree(folder)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))


def compare(
    shape: dict[str, Any], batches: list[Batch], folder: Path, args: argparse.Namespace
) -> dict[str, Any]:
    """Both levels, interleaved."""
    models = {
        level: Dlrm(
            folder / level,
            shape,
            threads=args.threads,
            undo_log="auto",
            dense_every="auto",
            durability=level,
        )
        for level in ("process", "power")
    }
    times: dict[str, list[float]] = {level: [] for level in models}
    lags = []
    for round_number in range(args.rounds + 1):
        for level, model in models.items():
            seconds = model.loop(batches, args.steps)
            if round_number > 0:
                times[level].append(1000 * seconds / args.steps)
        run = models["power"].run
        lags.append(run.committed_batch - (run.durable_batch or 0))
    result = summarize(f"DLRM {args.shape} zipf on {folder}", times, reference="process")
    stats = models["power"].pool.core.stats()
    committed = stats["batches"]
    unique = statistics.mean(
        sum(len(np.unique(c)) for c in b.sparse.values.view(len(shape["rows"]), -1).numpy())
        for b in batches[:8]
    )
    row_bytes = 4 * (shape["dim"] + 1)
    result |= {
        "lag_batches_max": max(lags),
        "dense_every": models["power"].run.dense_every,
        "journal_bytes_a_batch": stats["journal_bytes"] / committed,
        "distinct_row_bytes_a_batch": unique * row_bytes,
        "journal_over_rows": stats["journal_bytes"] / committed / (unique * row_bytes),
        "checkpoints": stats["checkpoints"],
        "data_sync_s": stats["data_sync_ns"] / 1e9,
        "waits_ms_a_batch": (stats["previous_wait_ns"] + stats["lag_wait_ns"]) / 1e6 / committed,
        "version": tcxl.__version__,
    }
    for key, value in result.items():
        if isinstance(value, int | float):
            print(f"  {key}: {value:.4g}")
    for model in models.values():
        model.pool.close()
    return result


if __name__ == "__main__":
    main()
