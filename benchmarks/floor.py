"""What a step of embeddings costs at least here: plain loops over the same rows, pages and batches.

    python benchmarks/floor.py [--only i,iii16] [--rounds 9] [--json FILE]

The floor of an engine with an undo log reads the rows of all lookups, stores the pooled output in
one pass, reads the gradient in another, sorts the row numbers, reads each distinct row again,
copies it to a log past the caches and stores it. It sums nothing, computes no checksums, checks no
input and commits nothing. The floor without a log leaves the copy out. Figures: how many times
longer FBGEMM, nn.EmbeddingBag and ours (SGD, one thread) take: `fbgemm/...` is the best that any
engine could reach over FBGEMM on this machine.
"""

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bars import DRAWS
from bars import SHAPES as SHAPE_NAMES
from loops import LEAD_IN, REPEATS, Candidate, num_batches, warm_up
from native_loops import change_rows, gather, gathers, read_in_order, sort_rows, write_in_order
from numpy.typing import NDArray
from peers import Fbgemm, TorchBags, bytes_of, mapped_tables
from report import Measurement, Result, Skipped, folder_in, need_bytes, options, run_script, timed
from rounds import ratios
from step import SHAPES, Ours, draw_batches

import trainingcxl as tcxl

LOGS = 4  # in turn, as frames of a ring are
Tables = list[NDArray[np.float32]]


def tables_in(folder: Path, shape: dict[str, Any]) -> Tables:
    """Tables (R, D) in files, with their pages."""
    tables = [table.numpy() for table in mapped_tables(folder, shape)]
    for table in tables:
        table.fill(1e-2)
    return tables


class Floor:
    """The plain loops on tables in files of a folder."""

    def __init__(self, tables: Tables, shape: dict[str, Any], logs: list[Tables]) -> None:
        self.tables, self.logs = tables, logs
        lookups = shape["batch"] * shape["lookups"]
        columns = len(tables) * shape["dim"]
        self.out, self.grad = (np.ones((shape["batch"], columns), np.float32) for _ in range(2))
        self.keys, self.spare = (np.zeros(lookups, np.uint64) for _ in range(2))
        self.distance = self.steps = 0

    def step(self, batch: tcxl.SparseFeatures, following: tcxl.SparseFeatures) -> None:
        """All lookups, then all changes, as an engine must."""
        del following
        ids = batch.values.view(len(self.tables), -1).numpy()
        for table, rows in zip(self.tables, ids, strict=True):
            gather(table, rows, self.distance)
        write_in_order(self.out)
        read_in_order(self.grad)
        logs = self.logs[self.steps % LOGS] if self.logs else [None] * len(self.tables)
        for table, rows, log in zip(self.tables, ids, logs, strict=True):
            change_rows(table, sort_rows(rows, self.keys, self.spare), log)
        self.steps += 1


def best_distance(floor: Floor, batch: tcxl.SparseFeatures, args: argparse.Namespace) -> int:
    """The prefetch distance that gathers fastest."""
    ids = batch.values.view(len(floor.tables), -1).numpy()

    def gather_all(distance: int, k: int) -> None:
        del k
        for table, rows in zip(floor.tables, ids, strict=True):
            gather(table, rows, distance)

    candidates = {name: partial(gather_all, distance) for name, distance in gathers().items()}
    times = timed(candidates, args, repeats=1, lead_in=1)
    return gathers()[min(times, key=lambda name: float(np.median(times[name].wall_ms)))]


def compare(name: str, args: argparse.Namespace) -> Result:
    """Uniform and Zipf rows of one shape."""
    shape, repeats = SHAPES[name], REPEATS[name]
    result = Result(threads=1)
    torch.set_num_threads(1)
    need_bytes(args.dir, int(6 * bytes_of(shape)))
    with folder_in(args.dir) as folder:
        ours = Ours(folder / "pool", shape, threads=1, undo_log="auto", optimizer="sgd")
        lookups = shape["batch"] * shape["lookups"]
        most = {**shape, "rows": [min(rows, lookups) for rows in shape["rows"]]}
        tables = tables_in(folder / "floor", shape)
        floor = Floor(tables, shape, [tables_in(folder / f"log{k}", most) for k in range(LOGS)])
        bare = Floor(tables, shape, [])
        engines: dict[str, Any] = {"ours": ours, "floor": floor, "floor without log": bare}
        try:
            engines["FBGEMM"] = Fbgemm(folder / "fbgemm", shape, optimizer="sgd")
        except Skipped as reason:
            result.skipped = {f"fbgemm/{name}/{draw}": str(reason) for draw in DRAWS}
        engines["nn.EmbeddingBag"] = TorchBags(folder / "torch", shape)
        for draw in DRAWS:
            batches = draw_batches(shape, num_batches(repeats, args.rounds), zipf=draw == "zipf")
            floor.distance = bare.distance = best_distance(floor, batches[0], args)
            warm_up(ours, batches)
            candidates = {key: Candidate(engine, batches) for key, engine in engines.items()}
            times = timed(candidates, args, repeats=repeats, lead_in=LEAD_IN)
            result.times |= {f"{draw} {key}": of for key, of in times.items()}
            for figure, key, below in (
                ("fbgemm", "FBGEMM", "floor"),
                ("torch", "nn.EmbeddingBag", "floor"),
                ("ours", "ours", "floor"),
                ("fbgemm-without-log", "FBGEMM", "floor without log"),
            ):
                if key in times:
                    result.figures[f"{figure}/{name}/{draw}"] = ratios(
                        times[key].wall_ms, times[below].wall_ms
                    )
        result.facts = {"medium": ours.pool.medium, "page_bytes": ours.pool.page_bytes}
        ours.pool.close()
    return result


MEASUREMENTS: dict[str, Measurement] = {name: partial(compare, name) for name in SHAPE_NAMES}

if __name__ == "__main__":
    run_script("floor.py", MEASUREMENTS, options(__doc__), quick=["iii16"])
