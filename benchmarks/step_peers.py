"""The embedding step (lookup, reduce, update) against FBGEMM's fused CPU TBE and torch's own.

    python benchmarks/step_peers.py [--only i/sgd,iii16/rowwise-adagrad] [--rounds 9] [--json FILE]

One thread each. Ours is durable (level `process`) with its undo log, written by the update itself:
there is no second thread. FBGEMM and torch keep nothing. Figures: their time over ours.
"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from bars import DRAWS
from bars import SHAPES as SHAPE_NAMES
from peers import Fbgemm, TorchBags, bytes_of
from report import Measurement, Result, folder_in, need_bytes, options, run_script, timed
from rounds import ratios
from step import SHAPES, Ours, draw_batches

import trainingcxl as tcxl

OPTIMIZERS = ("rowwise-adagrad", "sgd")
REPEATS = {"i": 1, "ii": 2, "iii16": 10, "iii128": 4}
WARM_UP = {"i": 6, "ii": 10, "iii16": 60, "iii128": 30}  # steps: until the log has its size
BATCHES_MAX = 24  # then they come again: long after the caches have forgotten them


def fresh(batches: list[tcxl.SparseFeatures], k: int) -> tuple[Any, Any]:
    """Batch k and the one after it."""
    return batches[k % len(batches)], batches[(k + 1) % len(batches)]


class Candidate:
    """Steps of an engine over batches in turn; ours announces the next one."""

    def __init__(self, engine: Any, batches: list[tcxl.SparseFeatures]) -> None:
        self.engine, self.batches = engine, batches

    def __call__(self, k: int) -> None:
        """One step."""
        if isinstance(self.engine, Ours) and k == 0:
            self.engine.core.drop_announced()
            self.engine.announce(self.batches[0])
        self.engine.step(*fresh(self.batches, k))


def compare(name: str, optimizer: str, args: argparse.Namespace) -> Result:
    """Uniform and Zipf rows on the same tables."""
    shape, repeats = SHAPES[name], REPEATS[name]
    result = Result(threads=1)
    torch.set_num_threads(1)
    need_bytes(args.dir, int(3.5 * bytes_of(shape)))
    with folder_in(args.dir) as folder:
        ours = Ours(folder / "pool", shape, threads=1, undo_log="fused", optimizer=optimizer)
        engines: dict[str, Any] = {"ours": ours}
        engines["FBGEMM"] = Fbgemm(folder / "fbgemm", shape, optimizer=optimizer)
        if optimizer == "sgd":
            engines["nn.EmbeddingBag"] = TorchBags(folder / "torch", shape)
        for draw in DRAWS:
            count = min(BATCHES_MAX, repeats * (args.rounds + 1)) + 1
            batches = draw_batches(shape, count, zipf=draw == "zipf")
            candidates: dict[str, Callable[[int], None]] = {
                key: Candidate(engine, batches) for key, engine in engines.items()
            }
            for candidate in candidates.values():
                for k in range(WARM_UP[name] if draw == DRAWS[0] else 0):
                    candidate(k)
            times = timed(candidates, args, repeats=repeats)
            result.times |= {f"{draw} {key}": of for key, of in times.items()}
            for peer, key in (("fbgemm", "FBGEMM"), ("torch", "nn.EmbeddingBag")):
                if key in times:
                    result.figures[f"{peer}/{name}/{draw}/{optimizer}"] = ratios(
                        times[key].wall_ms, times["ours"].wall_ms
                    )
        stats = ours.run.stats
        result.facts = {
            "medium": ours.pool.medium,
            "level": ours.pool.durability,
            "page_bytes": ours.pool.page_bytes,
            "log_bytes_a_batch": stats.log_bytes / stats.batches,
            "fused_share": stats.fused_batches / stats.batches,
            "flag_wait_ms_a_batch": 1e3 * stats.flag_wait_s / stats.batches,
        }
        ours.pool.close()
    return result


MEASUREMENTS: dict[str, Measurement] = {
    f"{name}/{optimizer}": partial(compare, name, optimizer)
    for name in SHAPE_NAMES
    for optimizer in OPTIMIZERS
}

if __name__ == "__main__":
    quick = [f"iii16/{optimizer}" for optimizer in OPTIMIZERS]
    run_script("step_peers.py", MEASUREMENTS, options(__doc__), quick=quick)
