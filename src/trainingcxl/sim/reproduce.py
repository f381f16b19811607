"""The paper's evaluation: every target, fitted and unfitted, with what moves it and beyond it."""

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from trainingcxl.sim.calibration import check_rule, frozen_calibration
from trainingcxl.sim.failures import medium_costs, recover, snapshot_goodput
from trainingcxl.sim.hardware import Hardware, load_hardware
from trainingcxl.sim.pool_scale import DEVICES_MAX, Fabric, PoolPoint, pool_sweep
from trainingcxl.sim.simulate import Result, simulate
from trainingcxl.sim.systems import SYSTEMS
from trainingcxl.sim.targets import TARGETS, evaluate_targets, run_grid, target_values
from trainingcxl.sim.variants import (
    Variant,
    ladder,
    sensitivity,
    structural_variants,
    workload_variants,
)
from trainingcxl.sim.workload import Model, model_set

__all__ = ["ORDER", "Evaluation", "evaluate", "order_violations"]

ORDER = ("CXL", "CXL-B", "CXL-D", "PCIe", "PMEM", "SSD")
_MTBF_HOURS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
_POOL_COUNTS = tuple(sorted({*(2**k for k in range(12)), 40, 80, 1280, DEVICES_MAX}))
_POOL_GPUS = (1, 8, 64)

Grid = dict[tuple[str, str], Result]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Everything `trainingcxl reproduce` shows. All results are a model."""

    hardware: Hardware
    models: tuple[Model, ...]
    grid: Grid
    targets: dict[str, float]
    unfitted: dict[str, float]
    engines_differ: dict[tuple[str, str], float]
    other_models: tuple[Model, ...]
    other_grid: Grid
    ladder: dict[str, dict[str, dict[str, float]]]
    sensitivity: dict[str, dict[str, dict[str, float]]]
    workload_variants: list[Variant]
    structural_variants: list[Variant]
    pools: dict[int, list[PoolPoint]]
    goodput: dict[str, list[tuple[float, float]]]
    costs: dict[str, dict[str, Any]]
    seconds: float


def evaluate(hardware: Hardware | None = None) -> Evaluation:
    """Run the whole evaluation with the frozen calibration.

    Raises:
        ParameterError: The calibration breaks the honest-calibration rule.
        ConservationError: A run lost bytes or time.
    """
    started = time.perf_counter()
    check_rule(frozen_calibration())
    hardware = hardware or load_hardware()
    models = tuple(model_set("paper"))
    grid = run_grid(hardware, models)
    targets = target_values(grid, models)
    others = (*model_set("deeprecinfra"), *model_set("mlperf"))
    return Evaluation(
        hardware=hardware,
        models=models,
        grid=grid,
        targets=targets,
        unfitted=evaluate_targets(load_hardware(calibrated=False), models),
        engines_differ=_engines(hardware, models, grid),
        other_models=others,
        other_grid=run_grid(hardware, others),
        ladder=ladder(hardware, models),
        sensitivity=sensitivity(hardware, models, targets),
        workload_variants=workload_variants(hardware, models),
        structural_variants=structural_variants(hardware, models),
        pools=_pools(hardware, models[1]),
        goodput=_goodput(hardware, models[1], grid),
        costs=_costs(hardware, models[1], grid),
        seconds=time.perf_counter() - started,
    )


def _engines(
    hardware: Hardware, models: Sequence[Model], grid: Grid
) -> dict[tuple[str, str], float]:
    """Relative difference of the event-driven engine from the closed form."""
    differ = {}
    for model in models:
        for system in SYSTEMS.values():
            event = simulate(system, hardware, model, engine="event", batches=8)
            closed = grid[system.name, model.name].seconds_per_batch
            differ[system.name, model.name] = event.seconds_per_batch / closed - 1.0
    return differ


def _pools(hardware: Hardware, model: Model) -> dict[int, list[PoolPoint]]:
    def fabric(gpus: int) -> Fabric:
        return Fabric(devices=1, gpus=gpus, radix=32, uplinks=4, switch_gbps=800.0)

    return {g: pool_sweep(fabric(g), hardware, model, _POOL_COUNTS) for g in _POOL_GPUS}


def _goodput(hardware: Hardware, model: Model, grid: Grid) -> dict[str, list[tuple[float, float]]]:
    """Lasting batches per second over the mean time between failures, per system."""
    model = _filling(model, hardware)
    bare = simulate(replace(SYSTEMS["CXL"], has_checkpoint=False), hardware, model)
    curves: dict[str, list[tuple[float, float]]] = {}
    for hours in _MTBF_HOURS:
        mtbf = hours * 3600.0
        for name in ("PMEM", "DRAM", "PCIe", "CXL-B", "CXL"):
            result = grid[name, model.name]
            found = recover(SYSTEMS[name], hardware, model, result, mtbf_s=mtbf)
            curves.setdefault(name, []).append((hours, found.batches_per_second))
        snapshots = snapshot_goodput(hardware, model, bare, mtbf_s=mtbf)
        label = "CXL without log, snapshots"
        curves.setdefault(label, []).append((hours, snapshots.batches_per_second))
    return curves


def _filling(model: Model, hardware: Hardware) -> Model:
    """Return the model with as many rows as the pool holds: snapshots grow with it, logs do not."""
    rows = math.floor(hardware.pool.capacity_bytes / model.table_bytes)
    return replace(model, tables=tuple(replace(t, rows=t.rows * rows) for t in model.tables))


def _costs(hardware: Hardware, model: Model, grid: Grid) -> dict[str, dict[str, Any]]:
    found = {}
    for name, system in SYSTEMS.items():
        costs = asdict(medium_costs(system, hardware, model, grid[name, model.name]))
        recovery = recover(system, hardware, model, grid[name, model.name], mtbf_s=86_400.0)
        found[name] = {**costs, "recovery_s": recovery.recovery_s}
    return found


def order_violations(grid: Grid, models: Sequence[Model]) -> list[str]:
    """Return the places where CXL <= CXL-B <= CXL-D <= PCIe < PMEM < SSD does not hold."""
    found = []
    for model in models:
        times = [grid[name, model.name].seconds_per_batch for name in ORDER]
        for fast, slow, a, b in zip(ORDER, ORDER[1:], times, times[1:], strict=False):
            if not (a < b or (a == b and slow not in ("PMEM", "SSD"))):
                found.append(f"{model.name}: {fast} {a:.6g} s, {slow} {b:.6g} s")
    return found


def error_percent(name: str, value: float) -> float:
    """Signed error of a model value against the paper, percent of the paper's magnitude."""
    paper = TARGETS[name].paper
    return 100.0 * (value - paper) / abs(paper)


def summary(evaluation: Evaluation) -> dict[str, Any]:
    """Return the JSON of `trainingcxl reproduce --json`."""
    calibration = frozen_calibration()
    targets = {}
    for name, target in TARGETS.items():
        value = evaluation.targets[name]
        targets[name] = {
            "meaning": target.meaning,
            "paper": target.paper,
            "model": value,
            "unit": target.unit,
            "average": target.average,
            "kind": "fitted" if target.is_fitted else "predicted",
            "error_pct": error_percent(name, value),
            "unfitted_model": evaluation.unfitted[name],
            "unfitted_error_pct": error_percent(name, evaluation.unfitted[name]),
            "note": target.note,
        }
    return {
        "kind": "model",
        "targets": targets,
        "per_model": _per_model(evaluation.grid, evaluation.models),
        "other_models": _per_model(evaluation.other_grid, evaluation.other_models),
        "order_violations": order_violations(evaluation.grid, evaluation.models),
        "engines_differ_max": max(abs(d) for d in evaluation.engines_differ.values()),
        "calibration": {
            "version": calibration.version,
            "constants": dict(calibration.constants),
            "fitted_on": dict(calibration.fitted_on),
        },
        "ladder": evaluation.ladder,
        "sensitivity": evaluation.sensitivity,
        "workload_variants": [asdict(v) for v in evaluation.workload_variants],
        "structural_variants": [asdict(v) for v in evaluation.structural_variants],
        "costs": {
            name: {k: None if v == math.inf else v for k, v in row.items()}
            for name, row in evaluation.costs.items()
        },
        "seconds": evaluation.seconds,
    }


def _per_model(grid: Grid, models: Sequence[Model]) -> dict[str, Any]:
    fast, slow = "CXL", "PMEM"
    found: dict[str, Any] = {}
    for model in models:
        rows = {}
        for system, name in grid:
            if name == model.name:
                result = grid[system, name]
                rows[system] = {
                    "seconds_per_batch": result.seconds_per_batch,
                    "energy_j": result.total_energy_j,
                    "breakdown_s": result.breakdown_s,
                }
        found[model.name] = {
            "systems": rows,
            "speedup_CXL_over_PMEM": grid[slow, model.name].seconds_per_batch
            / grid[fast, model.name].seconds_per_batch,
        }
    return found
