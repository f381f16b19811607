"""What level `power` costs on an ordinary file: the DLRM step against level `process`, same disk.

    python benchmarks/power.py [--only dlrm,light] [--disk FOLDER] [--rounds 9] [--json FILE]

dlrm: iii16, Zipf rows, the default dense part, logged by the default budget. light: the same with a
small dense part (a step of 10 to 20 ms on two cores). Where the sync of a step's bytes takes longer
than that step, the smallest `lookahead` and `dense_every` that hide it are looked for, and named.
Figures: step at `power` over step at `process`; journal bytes over those of the distinct rows.
"""

import argparse
import os
import statistics
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peers import bytes_of
from report import Measurement, Result, folder_in, need_bytes, options, run_script, timed
from rounds import ratios
from step import DEFAULT_WIDTHS, SHAPES, Dlrm
from undo_log_cost import distinct_rows, dlrm_batches, dlrm_facts

STEPS, WARM_UP = 20, 40
NUM_BATCHES = 64
LIGHT = (128, 64)
BAR = 1.10
# From the cheapest to the one with most slack: lookahead, dense_every.
SETTINGS: tuple[tuple[int, int | str], ...] = ((1, "auto"), (2, "auto"), (4, "auto"), (4, 200))


def sync_ms(folder: Path, num_bytes: int) -> float:
    """Median of overwriting so many bytes of a file and forcing them out."""
    folder.mkdir(parents=True, exist_ok=True)
    data, seconds = os.urandom(num_bytes), []
    path = folder / "sync"
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        for k in range(10):
            started = time.perf_counter()
            os.pwrite(fd, data, 0)
            os.fdatasync(fd)
            if k > 0:  # the first one also gives the file its blocks
                seconds.append(time.perf_counter() - started)
    finally:
        os.close(fd)
        path.unlink()
    return 1e3 * statistics.median(seconds)


def compare(
    widths: tuple[int, int], lookahead: int, dense_every: int | str, args: argparse.Namespace
) -> Result:
    """Both levels, interleaved, on the same disk."""
    torch.set_num_threads(2)
    shape = SHAPES["iii16"]
    batches = dlrm_batches(shape, NUM_BATCHES)
    need_bytes(args.disk, 6 * bytes_of(shape))
    with folder_in(args.disk) as folder:
        models = {
            level: Dlrm(
                folder / level,
                shape,
                threads=2,
                undo_log="auto",
                dense_every=dense_every,
                durability=level,
                widths=widths,
                lookahead=lookahead,
            )
            for level in ("process", "power")
        }
        lags: list[int] = []
        for model in models.values():
            model.loop(batches, WARM_UP)
        before, raw = models["power"].run.stats, models["power"].pool.core.stats()

        def loop(level: str, k: int) -> float:
            del k
            seconds = models[level].loop(batches, STEPS)
            run = models["power"].run
            lags.append(run.committed_batch - (run.durable_batch or 0))
            return seconds

        candidates = {level: partial(loop, level) for level in models}
        times = timed(candidates, args, steps=STEPS)
        result = Result(times=times)
        result.figures["ratio"] = ratios(times["power"].wall_ms, times["process"].wall_ms)
        now = models["power"].pool.core.stats()
        result.facts = dlrm_facts(models["power"], before) | journal_facts(raw, now)
        rows = distinct_rows(batches, len(shape["rows"]))
        row_bytes = rows * 4 * (shape["dim"] + 1)
        journal = result.facts["journal_bytes_a_step"]
        result.figures["journal-bytes"] = [journal / row_bytes]
        result.facts |= {"lag_batches_max": max(lags), "lookahead": lookahead}
        result.facts["sync_ms_of_these_bytes"] = sync_ms(args.disk, int(journal))
        for model in models.values():
            model.pool.close()
    return result


def journal_facts(before: Mapping[str, int], now: Mapping[str, int]) -> dict[str, Any]:
    """What the journal did in each step, and what the trainer waited for."""
    spent = {key: now[key] - before[key] for key in now}
    steps = spent["batches"]
    return {
        "journal_bytes_a_step": spent["journal_bytes"] / steps,
        "checkpoints": spent["checkpoints"],
        "data_sync_s": 1e-9 * spent["data_sync_ns"],
        "waits_ms_a_step": 1e-6 * (spent["previous_wait_ns"] + spent["lag_wait_ns"]) / steps,
    }


def dlrm(args: argparse.Namespace) -> Result:
    """The default dense part."""
    result = compare(DEFAULT_WIDTHS, 1, "auto", args)
    result.figures = {
        "power/dlrm": result.figures["ratio"],
        "power/journal-bytes": result.figures["journal-bytes"],
    }
    return result


def light(args: argparse.Namespace) -> Result:
    """A step of 10 to 20 ms; where its sync takes longer, the settings that hide it."""
    tried: dict[str, float] = {}
    for lookahead, dense_every in SETTINGS:
        result = compare(LIGHT, lookahead, dense_every, args)
        named = f"lookahead={lookahead}, dense_every={dense_every}"
        tried[named] = statistics.median(result.figures["ratio"])
        step_ms = statistics.median(result.times["process"].wall_ms)
        if tried[named] <= BAR or result.facts["sync_ms_of_these_bytes"] <= step_ms:
            break
    result.figures = {"power/light": result.figures["ratio"]}
    result.facts |= {"setting": named, "tried": tried, "step_ms": step_ms}
    return result


MEASUREMENTS: dict[str, Measurement] = {"dlrm": dlrm, "light": light}

if __name__ == "__main__":
    run_script("power.py", MEASUREMENTS, options(__doc__), quick=["light"])
