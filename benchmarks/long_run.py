"""Minutes of training on a file larger than half of the memory, beside the same pool in memory.

    python benchmarks/long_run.py FOLDER [--minutes 10] [--gib 13] [--memory /dev/shm] [--json FILE]

FOLDER lies on an ordinary disk. Stores into a mapped file make pages dirty; beyond the kernel's
limits (vm.dirty_*) the next store waits, and each written page faults again: short benchmarks do
not see that. Prints samples a second for every ten seconds, the median and worst step, the bytes
that the disks wrote, and the kernel's limits. The pool in memory is trained first, for a tenth of
the time.
"""

import argparse
import gc
import json
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from step import DenseModel
from torch import nn

import trainingcxl as tcxl
from trainingcxl.pool.write_back import dirty_limits, memory

TABLES, DIM, BATCH = 26, 16, 2048
STALL_S = 1.0
INTERVAL_S = 10.0
ZIPF_EXPONENT = 1.05


class Batches:
    """A Zipf draw per batch over every table, by the batch's number."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def seek(self, epoch: int, batch: int) -> None:
        """Go on there."""
        del epoch
        self.next = batch

    def __iter__(self) -> Any:
        a, rows = ZIPF_EXPONENT, self.rows
        number = self.next
        while True:
            rng = np.random.default_rng(number)
            u = rng.random((BATCH, TABLES))
            rank = (1 + u * ((rows + 1) ** (1 - a) - 1)) ** (1 / (1 - a)) - 1
            spread = np.clip(rank.astype(np.int64), 0, rows - 1) * 2654435761 % rows
            yield (
                torch.from_numpy(spread),
                torch.from_numpy(rng.random((BATCH, 13), dtype=np.float32)),
                torch.from_numpy((rng.random(BATCH) < 0.25).astype(np.float32)),
            )
            number += 1


def train(folder: Path, rows: int, seconds: float, threads: int) -> dict[str, Any]:
    """Trains that long and returns what was seen; one step is a whole DLRM step."""
    torch.manual_seed(0)
    tables = [
        tcxl.EmbeddingBagConfig(
            name=f"t{t}", num_embeddings=rows, embedding_dim=DIM, feature_names=[f"f{t}"]
        )
        for t in range(TABLES)
    ]
    began = time.perf_counter()
    with tcxl.Pool(folder, threads=threads) as pool:
        module = tcxl.EmbeddingBagCollection(
            pool, tables=tables, optimizer=tcxl.optim.RowWiseAdagrad(0.02)
        )
        dense = DenseModel(TABLES, DIM)
        run = tcxl.FaultTolerantRun(
            pool, dense, torch.optim.Adam(dense.parameters()), sparse_of=lambda batch: batch[0]
        )
        created = time.perf_counter() - began
        steps, marks = [], []
        first = last = mark = time.perf_counter()
        written = _written_bytes()
        for ids, values, labels in run.batches(Batches(rows)):
            logits = dense(values, module(ids))
            run.step(nn.functional.binary_cross_entropy_with_logits(logits, labels))
            now = time.perf_counter()
            steps.append(now - last)
            last = now
            if now - mark >= INTERVAL_S:
                done = len(steps) - sum(count for count, _ in marks)
                marks.append((done, done * BATCH / (now - mark)))
                print(
                    f"  {now - first:5.0f} s: {marks[-1][1]:8.0f} samples/s, worst step "
                    f"{max(steps[-done:]):.3f} s",
                    flush=True,
                )
                mark = now
            if now - first >= seconds:
                break
        return {
            "medium": pool.medium,
            "created_s": created,
            "batches": len(steps),
            "median_s": statistics.median(steps),
            "p99_s": float(np.quantile(steps, 0.99)),
            "worst_s": max(steps),
            "stalls": sum(step > STALL_S for step in steps),
            "samples_per_second": [rate for _, rate in marks],
            "written_bytes": _written_bytes() - written,
            "row_bytes": run.stats.rows * (DIM + 1) * 4,
            "log_bytes": run.stats.log_bytes,
        }


def _written_bytes() -> int:
    """Bytes that all disks have written since the machine started."""
    sectors = 0
    for line in Path("/proc/diskstats").read_text().splitlines():
        fields = line.split()
        if Path("/sys/block", fields[2]).exists() and not fields[2].startswith(("loop", "ram")):
            sectors += int(fields[9])
    return 512 * sectors


def main() -> None:
    """Trains in memory, then on the disk."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--gib", type=float, default=0.0, help="default: 0.55 of the memory")
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    args = parser.parse_args()
    total = memory()["total_bytes"]
    size = args.gib * (1 << 30) or 0.55 * total
    rows = int(size / TABLES / (DIM + 1) / 4)
    torch.set_num_threads(args.threads)
    args.folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {
        "pool_bytes": TABLES * rows * (DIM + 1) * 4,
        "memory_bytes": total,
        "dirty": dirty_limits(memory()["available_bytes"]),
    }
    shares = {"memory": (args.memory, 0.1), "disk": (args.folder, 1.0)}
    for name, (place, share) in shares.items():
        folder = Path(tempfile.mkdtemp(dir=place, prefix="tcxl-long-"))
        print(f"{name}: {found['pool_bytes'] / 1e9:.1f} GB in {place}", flush=True)
        try:
            found[name] = train(folder / "pool", rows, 60 * args.minutes * share, args.threads)
        finally:
            gc.collect()  # a run and its pool hold each other, and the pool's files their memory
            shutil.rmtree(folder)
    disk, base = found["disk"], found["memory"]
    found["ratio"] = disk["median_s"] / base["median_s"]
    gb = {name: disk[name] / 1e9 for name in ("written_bytes", "row_bytes", "log_bytes")}
    print(
        f"median step {1e3 * disk['median_s']:.1f} ms, in memory {1e3 * base['median_s']:.1f} ms: "
        f"{found['ratio']:.2f}x; p99 {1e3 * disk['p99_s']:.0f} ms, worst {disk['worst_s']:.2f} s, "
        f"{disk['stalls']} stalls over {STALL_S:g} s"
    )
    print(
        f"the disks wrote {gb['written_bytes']:.1f} GB for {gb['row_bytes']:.1f} GB of rows "
        f"and {gb['log_bytes']:.1f} GB of undo log"
    )
    print(json.dumps(found["dirty"]))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
