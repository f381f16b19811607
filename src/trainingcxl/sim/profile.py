"""Measured profiles of real runs: read, check their order, and project them onto other systems.

The schema is in `docs/simulator.md`. A profile names phases as the CXL schedules do; `dense` stands
for the whole dense part where a run cannot tell its pieces apart.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trainingcxl.sim.errors import ParameterError, parameter_error
from trainingcxl.sim.gpu import dense_times
from trainingcxl.sim.hardware import Hardware
from trainingcxl.sim.parameters import nearest
from trainingcxl.sim.schedule import Edge
from trainingcxl.sim.simulate import Result, simulate
from trainingcxl.sim.systems import SYSTEMS, System, build_schedule
from trainingcxl.sim.workload import Model, find_model, model_from

__all__ = [
    "PHASES",
    "Phase",
    "Profile",
    "Projection",
    "order_violations",
    "project",
    "read_profile",
]

PHASES = (
    "lookup",
    "bottom_forward",
    "vectors",
    "correct",
    "top",
    "gradients",
    "log_rows",
    "log_dense",
    "bottom_backward",
    "update",
    "dense",
)
_KEYS = (
    "schema",
    "system",
    "model",
    "medium",
    "log",
    "batches",
    "seconds",
    "phases",
    "spans",
    "locality",
)
# What a measured file has beyond them, for people and for trace viewers.
_PASSED_OVER = (
    "traceEvents",
    "displayTimeUnit",
    "kind",
    "durability",
    "step",
    "background",
    "rows",
    "bytes",
    "write_amplification",
    "per_batch",
    "dropped_spans",
)
_LOGS = ("after lookup", "announced")
_DENSE = ("bottom_forward", "top", "bottom_backward")
# Clocks of threads are read at slightly different moments.
_CLOCK_SLACK_S = 20e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One phase, averaged over batches: seconds it ran, bytes it read and wrote."""

    name: str
    seconds: float
    bytes_read: float = 0.0
    bytes_written: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A measured run: its model, per-batch phases, and when each phase of each batch ran.

    `spans` holds (batch, phase, start seconds, end seconds); `seconds` is the time of the run.
    `log` says when the undo log of the rows may begin: "after lookup" as in the paper, or as soon
    as the batch is "announced". `has_distinct_rows`: the locality has them as they were counted.
    """

    system: str
    model: Model
    medium: str
    batches: int
    seconds: float
    phases: Mapping[str, Phase]
    spans: tuple[tuple[int, str, float, float], ...]
    log: str = "after lookup"
    has_distinct_rows: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection:
    """The job on one system: the model's result, and which phases of it were measured."""

    system: str
    result: Result
    measured: tuple[str, ...]
    modelled: tuple[str, ...]


def _number(raw: Any, *, key: str, where: str) -> float:
    good = isinstance(raw, int | float) and not isinstance(raw, bool)
    if not good or not math.isfinite(raw) or raw < 0:
        raise parameter_error(f"key '{key}' is {raw!r}", where=where, do="a number of at least 0")
    return float(raw)


def _known(given: Mapping[str, Any], known: Sequence[str], *, prefix: str, where: str) -> None:
    for key in given:
        if key not in known:
            raise parameter_error(
                f"key '{prefix}{key}' is unknown", where=where, do=nearest(key, known)
            )


def _model(raw: Any, locality: Any, *, where: str) -> Model:
    if isinstance(raw, str):
        model = find_model(raw)
    elif isinstance(raw, dict):
        model = model_from(raw, where=where)
    else:
        raise parameter_error(
            f"key 'model' is {raw!r}", where=where, do="a model's name, or an object as in TOML"
        )
    if locality is None:
        return model
    _known(locality, ("reuse", "unique_share"), prefix="locality.", where=where)
    values = {k: _number(v, key=f"locality.{k}", where=where) for k, v in locality.items()}
    return model.with_locality(replace(model.locality, **values))


def _phase(raw: Any, *, where: str) -> Phase:
    if not isinstance(raw, dict) or raw.get("name") not in PHASES:
        name = raw.get("name") if isinstance(raw, dict) else raw
        raise parameter_error(
            f"phase {name!r} is unknown", where=where, do=nearest(str(name), PHASES)
        )
    known = ("name", "seconds", "bytes_read", "bytes_written")
    _known(raw, known, prefix="phases.", where=where)
    name = raw["name"]
    values = {
        key: _number(raw.get(key, 0.0), key=f"phases.{name}.{key}", where=where)
        for key in known[1:]
    }
    return Phase(name=name, **values)


def _span(raw: Any, *, where: str) -> tuple[int, str, float, float]:
    keys = ("batch", "phase", "start", "end")
    if not isinstance(raw, dict) or set(raw) != set(keys) or raw["phase"] not in PHASES:
        raise parameter_error(
            f"span {raw!r} is malformed", where=where, do=f"an object with {', '.join(keys)}"
        )
    start, end = (_number(raw[k], key=f"spans.{k}", where=where) for k in ("start", "end"))
    if end < start:
        raise parameter_error(f"span {raw!r} ends before it starts", where=where, do="start <= end")
    return int(_number(raw["batch"], key="spans.batch", where=where)), raw["phase"], start, end


def read_profile(path: Path) -> Profile:
    """Read and check a profile.

    Raises:
        ParameterError: The file is not JSON, of another schema, or has an unknown key or phase.
    """
    where = str(path)
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise parameter_error(
            f"cannot be read: {error}", where=where, do="give a JSON profile of `train --profile`"
        ) from error
    if not isinstance(tree, dict) or tree.get("schema") != 1:
        raise parameter_error("key 'schema' is not 1", where=where, do="a profile of schema 1")
    _known(tree, (*_KEYS, *_PASSED_OVER), prefix="", where=where)
    missing = [k for k in ("system", "model", "batches", "seconds", "phases") if k not in tree]
    if missing:
        do = "give Profile(..., model=)" if missing[0] == "model" else "add it"
        raise parameter_error(f"key '{missing[0]}' is missing", where=where, do=do)
    if tree["system"] not in ("CXL-B", "CXL"):
        raise parameter_error(
            f"key 'system' is {tree['system']!r}", where=where, do="one of CXL-B, CXL"
        )
    log = tree.get("log", _LOGS[0])
    if log not in _LOGS:
        raise parameter_error(f"key 'log' is {log!r}", where=where, do=f"one of {_LOGS}")
    batches = _number(tree["batches"], key="batches", where=where)
    if batches < 1:
        raise parameter_error(f"key 'batches' is {batches}", where=where, do="at least 1")
    phases = [_phase(p, where=where) for p in tree["phases"]]
    return Profile(
        system=tree["system"],
        model=_model(tree["model"], tree.get("locality"), where=where),
        medium=str(tree.get("medium", "unknown")),
        batches=int(batches),
        seconds=_number(tree["seconds"], key="seconds", where=where),
        phases={p.name: p for p in phases},
        spans=tuple(_span(s, where=where) for s in tree.get("spans", ())),
        log=log,
        has_distinct_rows="unique_share" in (tree.get("locality") or {}),
    )


def order_violations(profile: Profile, hardware: Hardware) -> list[str]:
    """Check a profile's spans against the partial order of its system's schedule.

    Returns:
        One sentence per violated dependency; empty when the run kept the order. Phases that the
        profile lacks are passed over, their dependencies joined.
    """
    schedule = build_schedule(SYSTEMS[profile.system], hardware, profile.model)
    when = {(b, n): (s, e) for b, n, s, e in profile.spans}
    present = {name for _, name in when}
    if "dense" in present:
        when |= {(b, "top"): span for (b, n), span in list(when.items()) if n == "dense"}
        present.add("top")
    waits: dict[str, set[tuple[str, int]]] = {}
    for step in schedule.steps:
        waits[step.name] = set()
        after = step.after
        if profile.log == "announced" and step.name == "log_rows":
            # Rows that the batch before changes are handed over by its update.
            after = (Edge("update", 2),)
        for edge in after:
            behind = {(edge.step, edge.batches_back)}
            if edge.step not in present:
                known = waits.get(edge.step, set())
                behind = {(name, back + edge.batches_back) for name, back in known}
            waits[step.name] |= behind
    found = []
    for (batch, name), (start, _) in sorted(when.items()):
        for other, back in sorted(waits.get(name, ())):
            before = when.get((batch - back, other))
            if before is not None and start < before[1] - _CLOCK_SLACK_S:
                found.append(
                    f"batch {batch}: {name} started {before[1] - start:.6f} s before {other} of "
                    f"batch {batch - back} ended"
                )
    return found


def _measured_dense(profile: Profile, hardware: Hardware) -> dict[str, float]:
    """Seconds of the dense steps as measured; `dense` is split in the model's proportions."""
    phases = profile.phases
    if "dense" not in phases:
        return {n: phases[n].seconds for n in _DENSE if n in phases}
    times = dense_times(hardware.gpu, profile.model)
    parts = (times.bottom_forward, times.top, times.bottom_backward)
    return {
        name: phases["dense"].seconds * sum(part) / times.total
        for name, part in zip(_DENSE, parts, strict=True)
    }


def project(
    profile: Profile, hardware: Hardware, systems: Mapping[str, System] = SYSTEMS
) -> tuple[list[Projection], dict[str, str]]:
    """Answer what a measured job would cost on each system, and which systems it does not fit.

    The dense part and the row statistics are taken from the profile where it has them; memory, link
    and log are modelled, since the run's own medium is not the one asked about.
    """
    dense = _measured_dense(profile, hardware)
    model = profile.model
    lookup, update = profile.phases.get("lookup"), profile.phases.get("update")
    measured = list(dense)
    if profile.has_distinct_rows:
        measured.append("distinct rows")
    elif lookup and update and lookup.bytes_read and update.bytes_written:
        share = min(update.bytes_written / lookup.bytes_read, 1.0)
        model = model.with_locality(replace(model.locality, unique_share=share))
        measured.append("distinct rows")
    found = []
    refused = {}
    for system in systems.values():
        try:
            result = simulate(system, hardware, model, measured_s=dense)
        except ParameterError as error:  # does not fit this medium; the others still answer
            refused[system.name] = str(error)
            continue
        names = {*PHASES, "distinct rows"} - {"dense", *measured}
        found.append(
            Projection(
                system=system.name,
                result=result,
                measured=tuple(measured),
                modelled=tuple(sorted(names)),
            )
        )
    return found, refused
