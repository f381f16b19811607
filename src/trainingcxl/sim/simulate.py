"""Simulate one model on one system and collect time, breakdown, utilisation, bytes and energy."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from trainingcxl.sim.closed_form import ROUNDS, Solution, Span, solve, step_seconds
from trainingcxl.sim.energy import Activity, energy_joules
from trainingcxl.sim.errors import ConservationError, parameter_error
from trainingcxl.sim.event_driven import Ledger, run_events
from trainingcxl.sim.hardware import Hardware
from trainingcxl.sim.schedule import CATEGORIES, Schedule
from trainingcxl.sim.systems import System, build_schedule
from trainingcxl.sim.workload import Locality, Model

__all__ = ["Result", "simulate"]

_SLACK = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A model of one batch in steady state. Seconds, bytes and joules are per batch.

    Attributes:
        system, model, engine: What ran; engine is closed or event.
        seconds_per_batch: Steady time of a batch.
        total_s: Time of all batches, the first one included.
        batches: Number of batches.
        breakdown_s: Exposed seconds by category; they sum to the batch time. Where several steps
            run at once the instant counts for the first of CATEGORIES; "stalls" is when none runs.
        work_s: Seconds of each category's steps alone, hidden or not.
        utilisation: Busy share by resource.
        bytes_moved: Bytes by resource, and by medium and direction.
        energy_j: Joules by component.
        timeline: Spans of the steps in the last steady batches, seconds.
    """

    system: str
    model: str
    engine: str
    seconds_per_batch: float
    total_s: float
    batches: int
    breakdown_s: dict[str, float]
    work_s: dict[str, float]
    utilisation: dict[str, float]
    bytes_moved: dict[str, float]
    energy_j: dict[str, float]
    timeline: tuple[Span, ...]

    @property
    def total_energy_j(self) -> float:
        """Joules of one batch."""
        return sum(self.energy_j.values())

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary; `kind` says that these are model values."""
        return {"kind": "model", **asdict(self), "total_energy_j": self.total_energy_j}


def simulate(
    system: System,
    hardware: Hardware,
    model: Model,
    *,
    engine: str = "closed",
    batches: int = 100,
    localities: Sequence[Locality] = (),
    rounds: int = ROUNDS,
    measured_s: Mapping[str, float] | None = None,
) -> Result:
    """Model `batches` batches of `model` on `system`.

    Args:
        system: Switches of the system.
        hardware: The machine.
        model: Shapes and locality.
        engine: "closed" (analytic) or "event" (SimPy).
        batches: Number of batches, at least 1.
        localities: Exact statistics per batch from a row trace; empty uses `model.locality`.
        rounds: Chunks per server and stage.
        measured_s: Seconds of steps that were measured, in place of the model's.

    Raises:
        ParameterError: Unknown engine, no batch, or a model that does not fit the medium.
        ConservationError: The run lost bytes or time.
    """
    if engine not in ("closed", "event"):
        raise parameter_error(f"engine is {engine!r}", where="engine", do="one of closed, event")
    if batches < 1:
        raise parameter_error(
            f"batches is {batches}", where="batches", do="a whole number of at least 1"
        )
    if localities:
        model = model.with_locality(_mean_locality(localities))

    def schedule_for(instance: Model) -> Schedule:
        return build_schedule(system, hardware, instance).with_seconds(measured_s or {})

    schedule = schedule_for(model)
    ledgers: dict[str, Ledger] | None = None
    if engine == "event":
        each = [schedule_for(model.with_locality(x)) for x in localities]
        run = run_events(each or schedule, batches=batches, rounds=rounds)
        solution, total, ledgers = run.solution, run.total_s, run.ledgers
    else:
        solution = solve(schedule, rounds=rounds)
        total = solution.first_batch_s + (batches - 1) * solution.seconds_per_batch
    return _collect(system, hardware, model, schedule, engine, batches, solution, total, ledgers)


def _mean_locality(localities: Sequence[Locality]) -> Locality:
    count = len(localities)
    return Locality(
        **{f.name: sum(getattr(x, f.name) for x in localities) / count for f in fields(Locality)}
    )


def _collect(
    system: System,
    hardware: Hardware,
    model: Model,
    schedule: Schedule,
    engine: str,
    batches: int,
    solution: Solution,
    total: float,
    ledgers: dict[str, Ledger] | None,
) -> Result:
    period = solution.seconds_per_batch
    busy = {}
    for name, resource in schedule.resources.items():
        if ledgers is not None:
            busy[name] = ledgers[name].busy_s / batches / resource.servers
        else:
            busy[name] = sum(p.seconds for _, p in _parts(schedule, name)) / (
                resource.servers * resource.speed
            )
    _check_busy(busy, period if ledgers is None else total / batches)
    activity = activity_of(schedule, period, busy)
    bytes_moved = _bytes(schedule)
    bytes_moved |= {f"{m} {k}": v for (m, k), v in activity.medium_bytes.items()}
    work = dict.fromkeys(CATEGORIES, 0.0)
    for step in schedule.steps:
        work[step.category] += step_seconds(schedule, step)
    spans = _window_spans(solution)
    return Result(
        system=system.name,
        model=model.name,
        engine=engine,
        seconds_per_batch=period,
        total_s=total,
        batches=batches,
        breakdown_s=_breakdown(schedule, solution),
        work_s=work,
        utilisation={name: min(b / period, 1.0) for name, b in busy.items()},
        bytes_moved=bytes_moved,
        energy_j=energy_joules(system, hardware, activity),
        timeline=spans,
    )


def _parts(schedule: Schedule, resource: str) -> Iterable[tuple[str, Any]]:
    for step in schedule.steps:
        for stage in step.stages:
            if stage.resource == resource:
                for part in stage.parts:
                    yield step.name, part


def _check_busy(busy: dict[str, float], period: float) -> None:
    for name, seconds in busy.items():
        if seconds > period * (1.0 + _SLACK):
            raise ConservationError(
                f"resource '{name}' is busy {seconds:.6g} s of a batch of {period:.6g} s"
                "\n  do:    report this schedule, its result is void"
            )


def activity_of(schedule: Schedule, period: float, busy: dict[str, float]) -> Activity:
    """Collect what one batch of a schedule did, for the energy model."""
    medium_bytes: dict[tuple[str, str], float] = {}
    medium_busy: dict[str, float] = {}
    link = host = 0.0
    for step in schedule.steps:
        host += step_seconds(schedule, step) if step.is_host_driven else 0.0
        for stage in step.stages:
            for part in stage.parts:
                moved = part.units * part.unit_bytes
                if part.medium:
                    key = (part.medium, part.kind)
                    medium_bytes[key] = medium_bytes.get(key, 0.0) + moved
                    medium_busy[part.medium] = medium_busy.get(part.medium, 0.0) + part.seconds
                link += moved if part.kind == "send" else 0.0
    return Activity(
        seconds=period,
        busy_s=busy,
        host_busy_s=host,
        medium_bytes=medium_bytes,
        medium_busy_s=medium_busy,
        link_bytes=link,
    )


def _bytes(schedule: Schedule) -> dict[str, float]:
    moved: dict[str, float] = {}
    for name in schedule.resources:
        total = sum(p.units * p.unit_bytes for _, p in _parts(schedule, name))
        if total:
            moved[name] = total
    return moved


def _window_spans(solution: Solution) -> tuple[Span, ...]:
    """Spans that overlap the three batch times before the end of the steady window."""
    start = solution.window[1] - 3.0 * solution.seconds_per_batch
    end = solution.window[1]
    inside = [s for s in solution.spans if s.end_s > start and s.start_s < end]
    return tuple(sorted(inside, key=lambda s: (s.start_s, s.batch)))


def _breakdown(schedule: Schedule, solution: Solution) -> dict[str, float]:
    """Attribute every instant of the steady window to one category."""
    start, end = solution.window
    rank = {step.name: CATEGORIES.index(step.category) for step in schedule.steps}
    marks: list[tuple[float, int, int]] = []
    for span in solution.spans:
        for begin, stop in span.active:
            low, high = max(begin, start), min(stop, end)
            if high > low:
                marks += [(low, rank[span.step], 1), (high, rank[span.step], -1)]
    marks.sort()
    result = {**dict.fromkeys(CATEGORIES, 0.0), "stalls": 0.0}
    active = [0] * len(CATEGORIES)
    now = start
    for time, category, change in [*marks, (end, 0, 0)]:
        if time > now:
            running = next((i for i, count in enumerate(active) if count), None)
            label = "stalls" if running is None else CATEGORIES[running]
            result[label] += time - now
            now = time
        active[category] += change
    return result
