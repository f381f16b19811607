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
from loops import LEAD_IN, REPEATS, Candidate, doubt, num_batches, step_facts, warm_up
from peers import Fbgemm, TorchBags, bytes_of
from report import Measurement, Result, Skipped, folder_in, need_bytes, options, run_script, timed
from rounds import ratios
from step import SHAPES, Ours, draw_batches

OPTIMIZERS = ("rowwise-adagrad", "sgd")
PEERS = (("fbgemm", "FBGEMM"), ("torch", "nn.EmbeddingBag"))


def compare(name: str, optimizer: str, args: argparse.Namespace) -> Result:
    """Uniform and Zipf rows on the same tables."""
    shape, repeats = SHAPES[name], REPEATS[name]
    result = Result(threads=1)
    torch.set_num_threads(1)
    need_bytes(args.dir, int(3.5 * bytes_of(shape)))
    with folder_in(args.dir) as folder:
        ours = Ours(folder / "pool", shape, threads=1, undo_log="auto", optimizer=optimizer)
        engines: dict[str, Any] = {"ours": ours}
        try:
            engines["FBGEMM"] = Fbgemm(folder / "fbgemm", shape, optimizer=optimizer)
        except Skipped as reason:
            result.skipped = {f"fbgemm/{name}/{draw}/{optimizer}": str(reason) for draw in DRAWS}
        if optimizer == "sgd":
            engines["nn.EmbeddingBag"] = TorchBags(folder / "torch", shape)
        for draw in DRAWS:
            batches = draw_batches(shape, num_batches(repeats, args.rounds), zipf=draw == "zipf")
            warm_up(ours, batches)
            before = ours.run.stats
            candidates: dict[str, Callable[[int], None]] = {
                key: Candidate(engine, batches) for key, engine in engines.items()
            }
            times = timed(candidates, args, repeats=repeats, lead_in=LEAD_IN)
            result.times |= {f"{draw} {key}": of for key, of in times.items()}
            for peer, key in PEERS:
                if key in times:
                    result.figures[f"{peer}/{name}/{draw}/{optimizer}"] = ratios(
                        times[key].wall_ms, times["ours"].wall_ms
                    )
            result.facts[draw] = step_facts(ours, before)
            result.doubt = result.doubt or doubt(result.facts[draw])
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
