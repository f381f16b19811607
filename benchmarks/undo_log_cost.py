"""What the undo log costs: the same engine with and without it, level `process`.

    python benchmarks/undo_log_cost.py [--only step/iii16,dlrm] [--rounds 9] [--json FILE]

step/SHAPE: the embedding step alone (SGD), one thread each: nothing hides the log there. Also the
bytes that the log writes for the bytes of the distinct rows. dlrm: a whole DLRM step (iii16, Zipf,
row-wise Adagrad, Adam), two threads each, log and dense generations by the defaults, or neither.
"""

import argparse
import statistics
from functools import partial
from typing import Any

import torch
from bars import DRAWS
from loops import LEAD_IN, REPEATS, Candidate, doubt, num_batches, step_facts, warm_up
from peers import bytes_of
from report import Measurement, Result, folder_in, need_bytes, options, run_script, timed
from rounds import ratios
from step import SHAPES, Dlrm, Ours, draw_batches
from step import _Batch as Batch

DLRM_STEPS = 20
DLRM_WARM_UP = 40


def step(name: str, args: argparse.Namespace) -> Result:
    """The embedding step with the log over the step without."""
    shape, repeats = SHAPES[name], REPEATS[name]
    torch.set_num_threads(1)
    need_bytes(args.dir, 3 * bytes_of(shape))
    result = Result(threads=1)
    with folder_in(args.dir) as folder:
        engines = {
            log: Ours(folder / log, shape, threads=1, undo_log=log, optimizer="sgd")
            for log in ("auto", "none")
        }
        # With no log to write, the background would still sort ahead: a second thread.
        engines["none"].core.set_undo_log("fused")
        for draw in DRAWS:
            batches = draw_batches(shape, num_batches(repeats, args.rounds), zipf=draw == "zipf")
            for engine in engines.values():
                warm_up(engine, batches)
            before = engines["auto"].run.stats
            candidates = {key: Candidate(engine, batches) for key, engine in engines.items()}
            times = timed(candidates, args, repeats=repeats, lead_in=LEAD_IN)
            result.times |= {f"{draw} {key}": of for key, of in times.items()}
            result.figures[f"log/{name}/{draw}"] = ratios(
                times["auto"].wall_ms, times["none"].wall_ms
            )
            facts = step_facts(engines["auto"], before)
            lookups = shape["batch"] * shape["lookups"] * len(shape["rows"])
            row_bytes = facts["distinct_row_share"] * lookups * 4 * shape["dim"]
            result.figures[f"log-bytes/{name}/{draw}"] = [facts["log_bytes_a_step"] / row_bytes]
            result.facts[draw] = facts
            result.doubt = result.doubt or doubt(facts)
        for engine in engines.values():
            engine.pool.close()
    return result


def dlrm_batches(shape: dict[str, Any], count: int) -> list[Batch]:
    """Batches of a whole DLRM, Zipf rows."""
    drawn = draw_batches(shape, count, zipf=True)
    return [Batch(sparse, shape["batch"], k) for k, sparse in enumerate(drawn)]


def dlrm(args: argparse.Namespace) -> Result:
    """The DLRM step by the defaults over the one with neither log nor dense generations."""
    torch.set_num_threads(2)
    shape = SHAPES["iii16"]
    batches = dlrm_batches(shape, 32)
    need_bytes(args.dir, 4 * bytes_of(shape))
    with folder_in(args.dir) as folder:
        models = {
            log: Dlrm(
                folder / log,
                shape,
                threads=2,
                undo_log=log,
                dense_every="auto" if log == "auto" else 1000,
            )
            for log in ("auto", "none")
        }

        def loop(model: Dlrm, k: int) -> float:
            del k
            return model.loop(batches, DLRM_STEPS)

        for model in models.values():
            model.loop(batches, DLRM_WARM_UP)
        before = models["auto"].run.stats
        candidates = {key: partial(loop, model) for key, model in models.items()}
        times = timed(candidates, args, steps=DLRM_STEPS)
        result = Result(times=times, threads=2)
        result.figures["log/dlrm"] = ratios(times["auto"].wall_ms, times["none"].wall_ms)
        result.facts = dlrm_facts(models["auto"], before)
        for model in models.values():
            model.pool.close()
    return result


def dlrm_facts(model: Dlrm, before: Any) -> dict[str, Any]:
    """What durability did in a DLRM's steps since `before`."""
    now = model.run.stats
    steps = now.batches - before.batches
    return {
        "medium": model.pool.medium,
        "level": model.pool.durability,
        "page_bytes": model.pool.page_bytes,
        "dense_every": model.run.dense_every,
        "dense_bytes_a_step": (now.dense_bytes - before.dense_bytes) / steps,
        "log_bytes_a_step": (now.log_bytes - before.log_bytes) / steps,
        "fused_share": (now.fused_batches - before.fused_batches) / steps,
        "flag_wait_share": (now.flag_wait_s - before.flag_wait_s)
        / max(1e-9, now.step_s - before.step_s),
    }


def distinct_rows(batches: list[Batch], num_tables: int) -> float:
    """Mean count of distinct rows a batch."""
    return statistics.mean(
        sum(len(column.unique()) for column in batch.sparse.values.view(num_tables, -1))
        for batch in batches[:8]
    )


MEASUREMENTS: dict[str, Measurement] = {
    **{f"step/{name}": partial(step, name) for name in ("iii16", "iii128", "i")},
    "dlrm": dlrm,
}

if __name__ == "__main__":
    run_script("undo_log_cost.py", MEASUREMENTS, options(__doc__), quick=["step/iii16", "dlrm"])
