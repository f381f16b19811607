"""The paper's schedule step by step, same engine, on the code path of DAX persistent memory.

    python benchmarks/ladder_schedule.py [--rounds 9] [--dir /dev/shm] [--json FILE]

The DLRM step of iii16 (Zipf rows), level `power`, in a folder in memory that is taken for DAX:
every record and row is flushed and fenced. Rungs: redo at the end of the batch (no undo log; the
trainer copies changed rows and the dense part to a redo log, streamed and fenced: its rows are
given, their optimizer state is left out, which favours it); batch-aware (the background writes the
undo log ahead of the update, the dense part every batch); relaxed (lookup of the next batch before
the update, the dense part when its cost fits the budget). Figures, percent: of the step that waits
for a flag; of the log's work that the rest of the step hides.
"""

import argparse
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from native_loops import log_bytes, log_rows
from peers import bytes_of
from report import Measurement, Result, folder_in, need_bytes, options, run_script, timed
from rounds import ratios
from step import SHAPES, Dlrm
from undo_log_cost import DLRM_STEPS, dlrm_batches

WARM_UP = 20
LOG_BYTES = 64 << 20
DAX: dict[str, Any] = {"durability": "power", "_medium": "fsdax"}


class RedoDlrm(Dlrm):
    """Rung 1: the engine without its log, and a redo log that is written after each batch."""

    def __init__(self, folder: Path, shape: dict[str, Any]) -> None:
        super().__init__(folder, shape, threads=2, undo_log="none", dense_every=1000, **DAX)
        self.weights = [table.weight for table in self.pool.tables.values()]
        self.log = np.memmap(folder / "redo", np.uint8, "w+", shape=(LOG_BYTES,))
        self.log[:] = 0
        self.rows: dict[int, list[Any]] = {}
        self.log_s = 0.0

    def learn(self, batches: list[Any]) -> None:
        """Which rows each batch changes."""
        for batch in batches:
            columns = batch.sparse.values.view(len(self.weights), -1).numpy()
            self.rows[id(batch)] = [np.unique(column) for column in columns]

    def end_step(self, batch: Any) -> None:
        """Rows, then the dense part and its optimizer's state."""
        began = time.perf_counter()
        at = 0
        for weight, rows in zip(self.weights, self.rows[id(batch)], strict=True):
            at = log_rows(weight, rows, self.log, at)
        for data in dense_bytes(self.dense, self.optimizer):
            at = log_bytes(data, self.log, at)
        self.log_s += time.perf_counter() - began


def dense_bytes(dense: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Views of the dense part's bytes, each a multiple of 8."""
    tensors = [p.detach() for p in dense.parameters()]
    for state in optimizer.state.values():
        tensors += [v for v in state.values() if torch.is_tensor(v) and v.numel() > 1]
    arrays = [tensor.reshape(-1).numpy().view(np.uint8) for tensor in tensors]
    return [array[: array.size // 8 * 8] for array in arrays]


def ladder(args: argparse.Namespace) -> Result:
    """The three rungs in turns."""
    torch.set_num_threads(2)
    shape = SHAPES["iii16"]
    need_bytes(args.dir, 6 * bytes_of(shape))
    batches = dlrm_batches(shape, 32)
    with folder_in(args.dir) as folder:
        redo = RedoDlrm(folder / "redo", shape)
        redo.learn(batches)
        ahead = partial(Dlrm, shape=shape, threads=2, undo_log="background", **DAX)
        models: dict[str, Dlrm] = {
            "redo": redo,
            "batch-aware": ahead(folder / "aware", dense_every=1),
            "relaxed": ahead(folder / "relaxed", dense_every="auto", lookup="relaxed"),
        }
        for model in models.values():
            model.loop(batches, WARM_UP)
        before = {key: model.run.stats for key, model in models.items()}
        raw = {key: model.pool.core.stats() for key, model in models.items()}
        redo.log_s = 0.0

        def loop(key: str, k: int) -> float:
            del k
            return models[key].loop(batches, DLRM_STEPS)

        times = timed({key: partial(loop, key) for key in models}, args, steps=DLRM_STEPS)
        result = Result(times=times, threads=2)
        for key in ("batch-aware", "relaxed"):
            fill_in(result, key, models[key], before[key], raw[key])
            faster = ratios(times["redo"].wall_ms, times[key].wall_ms)
            result.figures[f"ladder-a/redo-over-{key}"] = faster
        steps = (args.rounds + 1) * DLRM_STEPS
        redo_ms = 1e3 * redo.log_s / steps
        result.facts["redo"] = {
            "log_ms_a_step": redo_ms,
            "log_share_of_step": redo_ms / statistics.median(times["redo"].wall_ms),
        }
        for model in models.values():
            model.pool.close()
    return result


def fill_in(result: Result, key: str, model: Dlrm, before: Any, raw: dict[str, int]) -> None:
    """Figures and facts of a rung that the engine itself logs."""
    now, stats = model.run.stats, model.pool.core.stats()
    steps = now.batches - before.batches
    waited = now.flag_wait_s - before.flag_wait_s
    step_s = now.step_s - before.step_s
    log_s = 1e-9 * sum(
        stats[name] - raw[name] for name in ("background_log_ns", "background_sort_ns")
    )
    result.figures[f"ladder-a/{key}/flag-wait"] = [100 * waited / step_s]
    result.figures[f"ladder-a/{key}/hidden"] = [100 * (1 - min(1.0, waited / log_s))]
    result.facts[key] = {
        "medium": model.pool.medium,
        "level": model.pool.durability,
        "flush": model.pool.core.facts()["flush"],
        "dense_every": model.run.dense_every,
        "log_ms_a_step": 1e3 * log_s / steps,
        "flag_wait_ms_a_step": 1e3 * waited / steps,
        "log_bytes_a_step": (now.log_bytes - before.log_bytes) / steps,
        "corrected_share": (now.corrected_lookups - before.corrected_lookups)
        / max(1, now.lookups - before.lookups),
    }


MEASUREMENTS: dict[str, Measurement] = {"dlrm": ladder}

if __name__ == "__main__":
    run_script("ladder_schedule.py", MEASUREMENTS, options(__doc__))
