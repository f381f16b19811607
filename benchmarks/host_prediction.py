"""The simulator's prediction of an embedding step on this host, against the real engine.

    python benchmarks/host_prediction.py [--dir /dev/shm] [--steps 200] [--json FILE]

Calibrates the machine (`trainingcxl.sim.host`, nothing taken from a step), predicts shapes i, iii16
and iii128 of docs/performance.md with uniform and Zipf rows, and runs the engine's own step: SGD,
undo log on, one thread. Times are CPU times of the process, as wall times mean little on a shared
machine; both are printed. The bar is 25 %.
"""

import argparse
import json
import platform
import shutil
import statistics
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from step import SHAPES, Ours, draw_batches

from trainingcxl.sim.host import HostCalibration, calibrate_host, predict_host_step
from trainingcxl.sim.workload import Model, Tables

BAR = 0.25
BATCHES = 12


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


def measure(name: str, folder: Path, *, zipf: bool, steps: int) -> dict[str, float]:
    """CPU and wall milliseconds of the engine's step, the first half left out.

    `cpu_ms` is the least tenth, as the calibration takes the least of its repeats: both mean the
    undisturbed machine.
    """
    shape = SHAPES[name]
    batches = draw_batches(shape, BATCHES, zipf=zipf)
    sizes = [len(shape["rows"]), -1]
    distinct = statistics.mean(
        sum(len(np.unique(c)) for c in b.values.view(sizes).numpy()) for b in batches[:3]
    )
    engine = Ours(folder, shape, threads=1, log=True, optimizer="sgd")
    engine.announce(batches[0])
    cpu, wall = [], []
    for k in range(steps):
        started, used = time.perf_counter(), time.process_time()
        engine.step(batches[k % BATCHES], batches[(k + 1) % BATCHES])
        cpu.append(1e3 * (time.process_time() - used))
        wall.append(1e3 * (time.perf_counter() - started))
    engine.pool.close()
    late = steps // 2
    return {
        "cpu_ms": float(np.quantile(cpu[late:], 0.1)),
        "median_cpu_ms": statistics.median(cpu[late:]),
        "wall_ms": statistics.median(wall[late:]),
        "first_cpu_ms": statistics.median(cpu[:late]),
        "distinct_share": distinct / batches[0].values.numel(),
    }


def compare(
    name: str, args: argparse.Namespace, calibration: HostCalibration, *, zipf: bool
) -> dict[str, Any]:
    """Run the engine on one shape and set the prediction beside it."""
    folder = Path(tempfile.mkdtemp(dir=args.dir, prefix="trainingcxl-host-"))
    try:
        steps = max(args.steps // 8, 8) if name == "i" else args.steps
        found = measure(name, folder / "pool", zipf=zipf, steps=steps)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    prediction = predict_host_step(model_of(name, found["distinct_share"]), calibration)
    error = 1e3 * prediction.seconds / found["cpu_ms"] - 1.0
    label = f"{name} {'zipf' if zipf else 'uniform'}"
    verdict = "pass" if abs(error) <= BAR else "FAIL"
    print(
        f"{label:<16} engine {found['cpu_ms']:8.2f} ms CPU "
        f"(median {found['median_cpu_ms']:.2f}, wall {found['wall_ms']:.2f})  "
        f"model {1e3 * prediction.seconds:8.2f} ms  {error:+6.1%}  bar {BAR:.0%}: {verdict}",
        flush=True,
    )
    return {
        "shape": label,
        **found,
        "model_ms": 1e3 * prediction.seconds,
        "error": error,
        "parts": asdict(prediction),
    }


def main() -> None:
    """Calibrate, compare, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", default="/dev/shm", help="folder of pools and calibration files")
    parser.add_argument("--steps", type=int, default=200, help="steps of each small shape")
    parser.add_argument("--json", type=Path, help="write results here")
    args = parser.parse_args()
    calibration = calibrate_host(Path(args.dir))
    rows = [
        compare(n, args, calibration, zipf=z)
        for n in ("iii16", "iii128", "i")
        for z in (False, True)
    ]
    if args.json:
        machine = {
            "processor": platform.processor() or platform.machine(),
            "python": platform.python_version(),
        }
        args.json.write_text(
            json.dumps({"machine": machine, "host": asdict(calibration), "rows": rows}, indent=1)
        )


if __name__ == "__main__":
    main()
