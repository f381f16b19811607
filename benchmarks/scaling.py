"""Threads 1 and 2 of our engine, and tables from 1 MB to 8 GB.

    python benchmarks/scaling.py [--only threads/sgd,tables] [--disk FOLDER] [--json FILE]

threads: the embedding step of shape i with two threads against one, the log written by the update
itself (the log's writer would be a thread more). tables: 8 tables x dim 32, 10 lookups a bag, batch
2048, uniform rows, ever larger: the cost of a step must not grow beyond what the same random reads
cost in a bare loop. Sizes that fit neither in memory nor on the disk are left out and named.
"""

import argparse
from functools import partial
from typing import Any

import numpy as np
import torch
from bars import DRAWS
from loops import LEAD_IN, REPEATS, Candidate, doubt, num_batches, step_facts, warm_up
from native_loops import gather
from peers import bytes_of
from report import Measurement, Result, Skipped, folder_in, need_bytes, options, run_script, timed
from rounds import ratios
from step import SHAPES, Ours, draw_batches

SIZES = tuple(1 << k for k in range(20, 34))  # 1 MiB to 8 GiB


def threads(optimizer: str, args: argparse.Namespace) -> Result:
    """Two threads against one, shape i."""
    shape, repeats = SHAPES["i"], REPEATS["i"]
    torch.set_num_threads(1)
    need_bytes(args.dir, 3 * bytes_of(shape))
    result = Result()
    with folder_in(args.dir) as folder:
        engines = {
            n: Ours(folder / f"pool{n}", shape, threads=n, undo_log="auto", optimizer=optimizer)
            for n in (1, 2)
        }
        for draw in DRAWS:
            batches = draw_batches(shape, num_batches(repeats, args.rounds), zipf=draw == "zipf")
            for engine in engines.values():
                warm_up(engine, batches)
            before = {n: engine.run.stats for n, engine in engines.items()}
            candidates = {f"{n} threads": Candidate(e, batches) for n, e in engines.items()}
            times = timed(candidates, args, repeats=repeats, lead_in=LEAD_IN)
            result.times |= {f"{draw} {key}": of for key, of in times.items()}
            result.figures[f"threads/{draw}/{optimizer}"] = ratios(
                times["1 threads"].wall_ms, times["2 threads"].wall_ms
            )
            for n, engine in engines.items():
                facts = step_facts(engine, before[n])
                result.facts[f"{draw} {n} threads"] = facts
                result.doubt = result.doubt or doubt(facts)
        for engine in engines.values():
            engine.pool.close()
    return result


def table_shape(num_bytes: int) -> dict[str, Any]:
    """8 tables that have so many bytes together."""
    return {"rows": [num_bytes // (8 * 128)] * 8, "dim": 32, "lookups": 10, "batch": 2048}


def tables(args: argparse.Namespace) -> Result:
    """Milliseconds a step by size of the tables, beside the bare loop's over the same rows."""
    torch.set_num_threads(1)
    result = Result(threads=1)
    sizes = SIZES[::3] if args.quick else SIZES
    for size in sizes:
        label = f"{size >> 20} MiB"
        try:
            made = one_size(size, args)
        except Skipped as reason:
            result.facts[label] = f"left out: {reason}"
            continue
        result.times |= {f"{label} {key}": times for key, times in made.times.items()}
        result.facts[label] = made.facts
        result.doubt = result.doubt or made.doubt
        result.figures[f"tables/{size >> 20}/over-bare"] = made.figures["over-bare"]
    return result


def one_size(size: int, args: argparse.Namespace) -> Result:
    """The step and the bare loop at one size; in memory, or else on the disk."""
    shape, parent = table_shape(size), args.dir
    try:
        need_bytes(parent, size + size // 4 + (1 << 30))
    except Skipped:
        parent = args.disk
        need_bytes(parent, size + size // 4 + (1 << 30))
    with folder_in(parent) as folder:
        ours = Ours(folder / "pool", shape, threads=1, undo_log="auto", optimizer="sgd")
        weights = [table.weight for table in ours.pool.tables.values()]
        batches = draw_batches(shape, num_batches(5, args.rounds), zipf=False)
        ids = [batch.values.view(len(weights), -1).numpy() for batch in batches]

        def bare(k: int) -> None:
            for weight, rows in zip(weights, ids[k % len(ids)], strict=True):
                gather(weight, rows, 24)

        warm_up(ours, batches)
        before = ours.run.stats
        candidates = {"step": Candidate(ours, batches), "bare gather": bare}
        times = timed(candidates, args, repeats=5, lead_in=LEAD_IN)
        facts = step_facts(ours, before)
        lookups = batches[0].values.numel()
        facts["ns_a_lookup"] = 1e6 * float(np.median(times["step"].wall_ms)) / lookups
        ours.pool.close()
    over = ratios(times["step"].wall_ms, times["bare gather"].wall_ms)
    return Result(times=times, figures={"over-bare": over}, facts=facts, doubt=doubt(facts))


MEASUREMENTS: dict[str, Measurement] = {
    "threads/sgd": partial(threads, "sgd"),
    "threads/rowwise-adagrad": partial(threads, "rowwise-adagrad"),
    "tables": tables,
}

if __name__ == "__main__":
    run_script("scaling.py", MEASUREMENTS, options(__doc__), quick=["tables"])
