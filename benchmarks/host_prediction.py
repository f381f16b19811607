"""The simulator's prediction of an embedding step on this host, against the real engine.

    python benchmarks/host_prediction.py [--dir /dev/shm] [--rounds 5] [--undo-log fused]
        [--shapes iii16,iii128,i] [--json FILE]

Rounds of the calibration (`trainingcxl.sim.host`, nothing taken from a step) and windows of the
engine's own steps (SGD, undo log on, one thread, no dense part) take turns within the same minutes.
Both sides are then the same statistic, the median over rounds: of each constant, and of the mean
step of a window. The mean matters: a background log may write two batches in one step and none in
the next. The form of the log is named: "auto" takes the fused one where nothing hides the log, as
here, but the pauses between windows would mislead it. Times are CPU times of the whole process, as
wall times mean little on a shared machine; both are printed. The bar is 25 %, the aim 10 %.
"""

import argparse
import json
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from step import SHAPES, Ours, draw_batches

import trainingcxl as tcxl
from trainingcxl.sim.host import HostCalibration, median_calibration, predict_host_step
from trainingcxl.sim.host_kernels import Scratch, measure_round
from trainingcxl.sim.workload import Model, Tables

BAR, AIM = 0.25, 0.10
SCRATCH_BYTES = 1 << 30
# Batches that take turns, and steps of a window. Few batches would keep all their rows in cache.
SIZES = {"i": (8, 6), "iii16": (64, 60), "iii128": (40, 24)}
WARM_UP = 20  # steps


def model_of(name: str, distinct_share: float) -> Model:
    """The simulator's model of a benchmark shape, tables as they are."""
    shape = SHAPES[name]
    model = Model(
        name=name,
        batch=shape["batch"],
        interaction="cat",
        source="C",
        bottom=(13, shape["dim"]),
        top=(1,),
        tables=tuple(
            Tables(count=1, rows=r, lookups=shape["lookups"], dim=shape["dim"])
            for r in shape["rows"]
        ),
    )
    return model.with_locality(replace(model.locality, unique_share=distinct_share))


class Windows:
    """Steps of one engine over one kind of batches, a window at a time."""

    def __init__(self, engine: Ours, name: str, *, zipf: bool) -> None:
        self.engine = engine
        count, self.steps = SIZES[name]
        batches = draw_batches(SHAPES[name], count, zipf=zipf)
        shape = [len(SHAPES[name]["rows"]), -1]
        distinct = [
            sum(len(np.unique(column)) for column in batch.values.view(shape).numpy())
            for batch in batches[:3]
        ]
        self.distinct_share = statistics.mean(distinct) / batches[0].values.numel()
        self.label = f"{name} {'zipf' if zipf else 'uniform'}"
        self.pairs: Iterator[tuple[tcxl.SparseFeatures, tcxl.SparseFeatures]]
        self.pairs = pairwise(cycle(batches))
        self.cpu_ms: list[float] = []
        self.wall_ms: list[float] = []

    def run(self, warm_up: int, *, keep: bool = True) -> None:
        """Warm up, then time one window."""
        batch, following = next(self.pairs)
        self.engine.announce(batch)
        self.engine.step(batch, following)
        for _ in range(warm_up):
            self.engine.step(*next(self.pairs))
        started, used = time.perf_counter(), time.process_time()
        for _ in range(self.steps):
            self.engine.step(*next(self.pairs))
        used, wall = time.process_time() - used, time.perf_counter() - started
        self.engine.core.drop_announced()
        if keep:
            self.cpu_ms.append(1e3 * used / self.steps)
            self.wall_ms.append(1e3 * wall / self.steps)

    def compare(self, model: Model, calibration: HostCalibration, form: str) -> dict[str, Any]:
        """Set the prediction for a form of the log beside the median window."""
        prediction = predict_host_step(model, calibration, undo_log=form)
        cpu = statistics.median(self.cpu_ms)
        error = 1e3 * prediction.seconds / cpu - 1.0
        verdict = "aim" if abs(error) <= AIM else "pass" if abs(error) <= BAR else "FAIL"
        if statistics.median(self.wall_ms) > 1.1 * cpu:
            verdict += " (disturbed: the wall time is longer, run again)"
        print(
            f"{self.label:<15}{form:<11} engine {cpu:8.2f} ms CPU "
            f"[{min(self.cpu_ms):.2f}, {max(self.cpu_ms):.2f}], wall "
            f"{statistics.median(self.wall_ms):.2f}  model {1e3 * prediction.seconds:8.2f} ms  "
            f"{error:+6.1%}  bar {BAR:.0%}: {verdict}",
            flush=True,
        )
        return {
            "shape": self.label,
            "undo_log": form,
            "cpu_ms": self.cpu_ms,
            "wall_ms": self.wall_ms,
            "distinct_share": self.distinct_share,
            "model_ms": 1e3 * prediction.seconds,
            "error": error,
            "parts": asdict(prediction),
        }


def compare_shape(name: str, args: argparse.Namespace, scratch: Scratch) -> dict[str, Any]:
    """Calibration and engine in turns for one shape, uniform and Zipf rows."""
    folder = Path(tempfile.mkdtemp(dir=args.dir, prefix="trainingcxl-host-"))
    try:
        engine = Ours(
            folder / "pool", SHAPES[name], threads=1, undo_log=args.undo_log, optimizer="sgd"
        )
        both = [Windows(engine, name, zipf=zipf) for zipf in (False, True)]
        for windows in both:
            windows.run(WARM_UP, keep=False)
        measured = []
        for round_number in range(args.rounds):
            measured.append(measure_round(args.dir, scratch, round_number))
            for windows in both:
                windows.run(max(2, windows.steps // 4))
        engine.pool.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    calibration = median_calibration(measured)
    rows = [w.compare(model_of(name, w.distinct_share), calibration, args.undo_log) for w in both]
    return {"host": asdict(calibration), "rows": rows}


def main() -> None:
    """Calibrate, compare, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, default=Path("/dev/shm"), help="folder of the pools")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shapes", default="iii16,iii128,i")
    parser.add_argument(
        "--undo-log", choices=("background", "fused"), default="fused", help="who writes it"
    )
    parser.add_argument("--json", type=Path, help="write results here")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with Scratch(args.dir, SCRATCH_BYTES) as scratch:
        shapes = {name: compare_shape(name, args, scratch) for name in args.shapes.split(",")}
    if args.json:
        machine = {
            "processor": platform.processor() or platform.machine(),
            "python": platform.python_version(),
        }
        args.json.write_text(json.dumps({"machine": machine, "shapes": shapes}, indent=1))


if __name__ == "__main__":
    main()
