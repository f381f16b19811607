"""`trainingcxl simulate`: the hardware model of one system. Needs no torch and no native core."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click

from trainingcxl.sim.errors import ParameterError, parameter_error
from trainingcxl.sim.hardware import Hardware, load_hardware, parse_assignment
from trainingcxl.sim.simulate import Result, simulate
from trainingcxl.sim.systems import SYSTEMS, System, find_system
from trainingcxl.sim.workload import Locality, Model, Tables, find_model

__all__ = ["command", "wrong_use"]

_TIMELINE_CELLS = 40
_ZIPF_BATCHES = 8


class _WrongUse(click.ClickException):
    exit_code = 2


@contextmanager
def wrong_use() -> Iterator[None]:
    """Turn a bad parameter into one message and exit code 2."""
    try:
        yield
    except ParameterError as error:
        raise _WrongUse(str(error)) from error


@click.command("simulate")
@click.option("--system", default="CXL", show_default=True, help=f"One of {', '.join(SYSTEMS)}.")
@click.option("--model", default="RM2", show_default=True, help="Shipped name, or a TOML file.")
@click.option("--batches", default=100, show_default=True, help="Batches to run.")
@click.option("--hardware", type=click.Path(path_type=Path), help="TOML file of overrides.")
@click.option("--set", "assignments", multiple=True, help="key=value, as link.bandwidth_gbps=50.")
@click.option("--sweep", help="key=v1,v2,...: one line per value.")
@click.option(
    "--engine", type=click.Choice(["closed", "event"]), default="closed", show_default=True
)
@click.option("--trace", help="FILE.npy of row ids, criteo:FILE, zipf, or zipf:REUSE.")
@click.option("--devices", type=int, help="Pool of so many expanders behind switches (system CXL).")
@click.option("--gpus", default=1, show_default=True, help="GPUs of the pool, with --devices.")
@click.option("--mtbf-hours", type=float, help="Also show recovery, goodput, price, endurance.")
@click.option("--from-profile", type=click.Path(path_type=Path), help="Project a measured run.")
@click.option("--calibrate-host", type=click.Path(path_type=Path), help="Measure this machine.")
@click.option("--show-hardware", is_flag=True, help="List every number with tag and source.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(**options: Any) -> None:
    """Model the time, utilisation, bytes and energy of a batch on one of the paper's systems.

    All results are a model, not a measurement.
    """
    with wrong_use():
        hardware = load_hardware(options["hardware"], assignments=options["assignments"])
        action = _choose(options)
        found = action(hardware, options)
    if options["as_json"]:
        click.echo(json.dumps(found["json"], allow_nan=False))
    else:
        click.echo(found["text"])


def _choose(options: dict[str, Any]) -> Callable[[Hardware, dict[str, Any]], dict[str, Any]]:
    if options["show_hardware"]:
        return _hardware_table
    if options["calibrate_host"]:
        return _calibrate
    if options["from_profile"]:
        return _project
    if options["devices"] is not None:
        return _pool
    return _sweep if options["sweep"] else _one


def _finite(value: Any) -> Any:
    """JSON has no infinity; None stands for "not limited"."""
    if isinstance(value, dict):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and value in (float("inf"), float("-inf")) else value


def _hardware_table(hardware: Hardware, options: dict[str, Any]) -> dict[str, Any]:
    lines = [f"{'key':<34}{'value':>12}  tag source"]
    tree = {}
    for key, value in hardware.values().items():
        note = hardware.notes[key]
        shown = f"{value:g}" if isinstance(value, float) else str(value)
        lines.append(f"{key:<34}{shown:>12}  [{note.tag}] {note.source}")
        tree[key] = {"value": value, "tag": note.tag, "source": note.source}
    return {"json": tree, "text": "\n".join(lines)}


def _calibrate(hardware: Hardware, options: dict[str, Any]) -> dict[str, Any]:
    from trainingcxl.sim.host import calibrate_host, write_calibration

    path: Path = options["calibrate_host"]
    found = calibrate_host(path.resolve().parent)
    write_calibration(found, path)
    lines = [f"measured on this machine, written to {path}"]
    lines += [f"  {key:<28}{value}" for key, value in asdict(found).items()]
    return {"json": asdict(found), "text": "\n".join(lines)}


def _traced(
    model: Model, hardware: Hardware, options: dict[str, Any]
) -> tuple[Model, list[Locality]]:
    """Return the model and the statistics of the trace that was asked for; none if none was."""
    given: str | None = options["trace"]
    if given is None:
        return model, []
    channels, batches = hardware.expander.channels, options["batches"]
    from trainingcxl.sim.trace import read_trace, trace_localities, zipf_localities

    kind, _, rest = given.partition(":")
    where = f"--trace {given}"
    if kind == "zipf":
        reuse = parse_assignment(f"reuse={rest}")[1] if rest else model.locality.reuse
        if isinstance(reuse, str) or not 0.0 <= reuse <= 1.0:
            raise parameter_error(f"reuse is {rest!r}", where=where, do="[0, 1]")
        count = min(batches, _ZIPF_BATCHES)
        return model, zipf_localities(model, reuse=reuse, channels=channels, batches=count)
    if kind == "criteo":
        model, ids = _criteo(rest, model, batches, where)
    else:
        ids = read_trace(Path(given))
    return model, trace_localities(ids, model, channels=channels, batches_max=batches, where=where)


def _criteo(path: str, model: Model, batches: int, where: str) -> tuple[Model, Any]:
    """Read the ids of a Criteo file; the model's tables get the rows that the data needs."""
    import numpy as np

    from trainingcxl.data import open_data
    from trainingcxl.errors import TrainingCXLError

    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "trainingcxl"
    cache.mkdir(parents=True, exist_ok=True)
    try:
        data = open_data(f"criteo:{path}", cache_dir=cache, require_labels=False)
    except TrainingCXLError as error:
        raise parameter_error(str(error), where=where, do="give Criteo text") from error
    dims = {group.dim for group in model.tables}
    if len(dims) != 1 or model.num_tables != len(data.features):
        raise parameter_error(
            f"model '{model.name}' has {model.num_tables} tables, the data {len(data.features)}",
            where=where,
            do="take --model DLRM, or a model with one table a feature",
        )
    width = dims.pop()
    tables = tuple(
        Tables(count=1, rows=feature.cardinality, lookups=1, dim=width) for feature in data.features
    )
    count = min(data.num_samples, (batches + 1) * model.batch)
    return replace(model, tables=tables), data.read(np.arange(count)).ids


def _run(system: System, model: Model, hardware: Hardware, options: dict[str, Any]) -> Result:
    model, localities = _traced(model, hardware, options)
    return simulate(
        system,
        hardware,
        model,
        engine=options["engine"],
        batches=options["batches"],
        localities=localities,
    )


def _one(hardware: Hardware, options: dict[str, Any]) -> dict[str, Any]:
    system, model = find_system(options["system"]), find_model(options["model"])
    result = _run(system, model, hardware, options)
    tree: dict[str, Any] = result.to_json()
    text = _describe(result)
    if options["mtbf_hours"] is not None:
        extra, lines = _failures(system, model, hardware, result, options["mtbf_hours"])
        tree["beyond"] = extra
        text = f"{text}\n{lines}"
    return {"json": _finite(tree), "text": text}


def _describe(result: Result) -> str:
    period = result.seconds_per_batch
    lines = [
        f"model: {result.model} on {result.system}, {result.engine} engine, "
        f"{result.batches} batches",
        f"  time a batch      {period * 1e3:.3f} ms (model)",
        f"  time of all       {result.total_s:.3f} s (model)",
        "  breakdown (exposed time; work of the phase, hidden or not)",
    ]
    for name, seconds in result.breakdown_s.items():
        work = result.work_s.get(name)
        alone = "" if work is None else f"  ({work * 1e3:.3f} ms)"
        lines.append(f"    {name:<14}{seconds * 1e3:>11.3f} ms {seconds / period:>6.1%}{alone}")
    lines.append("  utilisation")
    lines += [f"    {name:<22}{share:>7.1%}" for name, share in result.utilisation.items()]
    lines.append("  bytes a batch")
    lines += [f"    {name:<22}{size / 1e6:>12.3f} MB" for name, size in result.bytes_moved.items()]
    lines.append(f"  energy a batch    {result.total_energy_j:.4f} J (model)")
    lines += [f"    {name:<22}{joules:>12.4f} J" for name, joules in result.energy_j.items()]
    return "\n".join([*lines, *_timeline(result)])


def _timeline(result: Result) -> list[str]:
    """Show the steps of one steady batch, and when they were served rather than waiting."""
    numbers = sorted({span.batch for span in result.timeline})
    shown = [s for s in result.timeline if s.batch == numbers[len(numbers) // 2]] if numbers else []
    start = min((s.start_s for s in shown), default=0.0)
    total = max((s.end_s for s in shown), default=1.0) - start
    lines = ["  timeline of one batch in steady state (= served, . waiting)"]
    for span in shown:
        cells = [" "] * _TIMELINE_CELLS
        for intervals, mark in ((((span.start_s, span.end_s),), "."), (span.active, "=")):
            for low, high in intervals:
                first = int((low - start) / total * (_TIMELINE_CELLS - 1))
                last = int((high - start) / total * (_TIMELINE_CELLS - 1))
                cells[first : last + 1] = mark * (last + 1 - first)
        begin, end = (span.start_s - start) * 1e3, (span.end_s - start) * 1e3
        lines.append(f"    {span.step:<26}|{''.join(cells)}| {begin:.3f} - {end:.3f} ms")
    return lines


def _failures(
    system: System, model: Model, hardware: Hardware, result: Result, mtbf_hours: float
) -> tuple[dict[str, Any], str]:
    from trainingcxl.sim.failures import medium_costs, recover, snapshot_goodput

    mtbf = mtbf_hours * 3600.0
    bare = simulate(replace(system, has_checkpoint=False), hardware, model)
    failures = recover(system, hardware, model, result, mtbf_s=mtbf)
    snapshots = snapshot_goodput(hardware, model, bare, mtbf_s=mtbf)
    costs = medium_costs(system, hardware, model, result)
    lines = [
        f"  failures (model), one in {mtbf_hours:g} h",
        f"    recovery          {failures.recovery_s:.2f} s, lost work {failures.lost_s:.3f} s",
        f"    goodput           {failures.goodput:.4%}, "
        f"{failures.batches_per_second:.3f} batches/s",
        f"    best snapshots    {snapshots.goodput:.4%}, "
        f"{snapshots.batches_per_second:.3f} batches/s (no log, Daly's interval)",
        f"  medium {costs.medium}: {costs.tables_gb:.1f} of {costs.capacity_gb:.0f} GB, price "
        f"{costs.price_ratio:g}x DRAM, writes {costs.written_gb_per_day:.0f} GB a day, "
        f"lasts {costs.lifetime_years:.3g} years",
    ]
    tree = {"failures": asdict(failures), "snapshots": asdict(snapshots), "costs": asdict(costs)}
    return tree, "\n".join(lines)


def _sweep(hardware: Hardware, options: dict[str, Any]) -> dict[str, Any]:
    key, _, raw = options["sweep"].partition("=")
    values = [parse_assignment(f"{key}={v}")[1] for v in raw.split(",") if v]
    if not values:
        raise parameter_error(
            f"'{options['sweep']}' has no values", where="--sweep", do="write key=v1,v2,..."
        )
    system, model = find_system(options["system"]), find_model(options["model"])
    rows = []
    lines = [
        f"model: {model.name} on {system.name}",
        f"{key:>26}{'ms a batch':>14}{'J a batch':>12}  busiest",
    ]
    for value in values:
        changed = hardware.with_values({key: value}, where=f"--sweep {key}")
        result = _run(system, model, changed, options)
        rows.append({"value": value, **result.to_json()})
        name, share = max(result.utilisation.items(), key=lambda item: item[1])
        lines.append(
            f"{value:>26} {result.seconds_per_batch * 1e3:>13.3f} {result.total_energy_j:>11.4f}"
            f"  {name} {share:.0%}"
        )
    return {"json": {"kind": "model", "key": key, "points": rows}, "text": "\n".join(lines)}


def _pool(hardware: Hardware, options: dict[str, Any]) -> dict[str, Any]:
    from trainingcxl.sim.pool_scale import Fabric, pool_point

    model = find_model(options["model"])
    fabric = Fabric(
        devices=options["devices"], gpus=options["gpus"], radix=32, uplinks=4, switch_gbps=800.0
    )
    point = pool_point(fabric, hardware, model)
    lines = [
        f"model: {model.name} on a CXL pool of {fabric.devices} expanders, {fabric.gpus} GPUs",
        f"  time a batch      {point.seconds_per_batch * 1e3:.3f} ms (model)",
        f"  samples a second  {point.samples_per_second:.0f} (model)",
        f"  limited by        {point.limit}",
        *(f"    {name:<22}{share:>7.1%}" for name, share in point.utilisation.items()),
    ]
    tree = {"kind": "model", **asdict(point), "limit": point.limit}
    return {"json": tree, "text": "\n".join(lines)}


def _project(hardware: Hardware, options: dict[str, Any]) -> dict[str, Any]:
    from trainingcxl.sim.profile import order_violations, project, read_profile

    profile = read_profile(options["from_profile"])
    projections, refused = project(profile, hardware)
    violations = order_violations(profile, hardware)
    per_batch = profile.seconds / profile.batches
    lines = [
        f"measured: {profile.model.name}, {profile.batches} batches on medium "
        f"{profile.medium}, {per_batch * 1e3:.3f} ms a batch",
        f"{'system':>8}{'ms a batch':>14}{'J a batch':>12}  (model)",
    ]
    lines += [
        f"{p.system:>8}{p.result.seconds_per_batch * 1e3:>14.3f}{p.result.total_energy_j:>12.4f}"
        for p in projections
    ]
    lines += [f"{name:>8}  refused: {reason.splitlines()[0]}" for name, reason in refused.items()]
    if projections:
        lines.append(f"measured phases: {', '.join(projections[0].measured) or 'none'}")
        lines.append(f"modelled phases: {', '.join(projections[0].modelled)}")
    lines += [f"warning: order violated: {v}" for v in violations]
    tree = {
        "kind": "model",
        "measured": {"seconds_per_batch": per_batch, "medium": profile.medium},
        "systems": {
            p.system: {
                "seconds_per_batch": p.result.seconds_per_batch,
                "energy_j": p.result.total_energy_j,
                "measured": list(p.measured),
                "modelled": list(p.modelled),
            }
            for p in projections
        },
        "refused": refused,
        "order_violations": violations,
    }
    return {"json": tree, "text": "\n".join(lines)}


if __name__ == "__main__":
    command()
