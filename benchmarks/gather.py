"""The forward lookup against the memory's limits: sequential read, and a bare gather loop.

    python benchmarks/gather.py [--only memory] [--disk FOLDER] [--json FILE]

Shape i (8 tables x 1M rows x 128 B, 80 lookups a bag), uniform rows, one thread, on tmpfs and on an
ordinary disk (whose mapping may have larger pages). The bare loop reads the rows of the same
lookups from the same pages and writes nothing; the best prefetch distance counts.
"""

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from native_loops import gather, gathers, read_in_order
from peers import bytes_of
from report import Measurement, Result, folder_in, need_bytes, options, run_script, timed
from rounds import ratios
from step import SHAPES, Ours, draw_batches

_NUM_BATCHES = 4


def compare(place: str, args: argparse.Namespace) -> Result:
    """Our lookup, the bare loop, and sequential read over the pages of one pool."""
    torch.set_num_threads(1)
    shape: dict[str, Any] = SHAPES["i"]
    parent: Path = args.dir if place == "memory" else args.disk
    need_bytes(parent, 2 * bytes_of(shape))
    with folder_in(parent) as folder:
        ours = Ours(folder / "pool", shape, threads=1, undo_log="fused", optimizer="sgd")
        tables = [table.weight for table in ours.pool.tables.values()]
        batches = draw_batches(shape, _NUM_BATCHES, zipf=False)
        inputs = [ours.module.group_input(batch) for batch in batches]
        ids = [batch.values.view(len(tables), -1).numpy() for batch in batches]

        def lookup(k: int) -> None:
            ours.core.lookup(*inputs[k % _NUM_BATCHES], ours.out)

        def bare(distance: int, k: int) -> None:
            for table, rows in zip(tables, ids[k % _NUM_BATCHES], strict=True):
                gather(table, rows, distance)

        def read(k: int) -> None:
            del k
            for table in tables:
                read_in_order(table)

        candidates = {"lookup": lookup, "sequential read": read}
        candidates |= {name: partial(bare, distance) for name, distance in gathers().items()}
        times = timed(candidates, args, repeats=2, lead_in=1)
        pages = ours.pool.page_bytes
        result = Result(times=times, threads=1)
        gathered = ids[0].size * 4 * shape["dim"]
        read_bytes = bytes_of(shape)
        best = min(gathers(), key=lambda name: np.median(times[name].wall_ms))
        # Shares of bandwidth: bytes over time of the lookup, over the same of sequential read.
        share = ratios(times["sequential read"].wall_ms, times["lookup"].wall_ms)
        shares = [100 * x * gathered / read_bytes for x in share]
        size = "huge" if pages >= 2 << 20 else "small"
        result.figures = {
            f"gather/{place}/of-read": shares,
            f"gather/{place}/of-read-{size}": shares,  # their bars differ
            f"gather/{place}/of-bare": ratios(times[best].wall_ms, times["lookup"].wall_ms),
        }
        other = "huge" if size == "small" else "small"
        result.skipped = {f"gather/{place}/of-read-{other}": f"the pool has pages of {pages} bytes"}
        result.facts = {
            "medium": ours.pool.medium,
            "page_bytes": pages,
            "best_bare": best,
            "read_gbps": read_bytes / np.median(times["sequential read"].wall_ms) / 1e6,
            "lookup_gbps": gathered / np.median(times["lookup"].wall_ms) / 1e6,
            "bare_gbps": gathered / np.median(times[best].wall_ms) / 1e6,
        }
        ours.pool.close()
    return result


MEASUREMENTS: dict[str, Measurement] = {
    "memory": partial(compare, "memory"),
    "disk": partial(compare, "disk"),
}

if __name__ == "__main__":
    run_script("gather.py", MEASUREMENTS, options(__doc__), quick=["memory"])
