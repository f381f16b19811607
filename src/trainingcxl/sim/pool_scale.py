"""Beyond the paper: a pool of D expanders behind levels of switches, and several GPUs.

The relaxed schedule (CXL) is kept. Tables are dealt to devices; with more devices than tables a
table is striped by rows over several, and each of them sends its partial sum of every bag it has a
row of. Every GPU trains a batch of its own, so the load grows with the GPUs; the dense gradients
are averaged over a ring of the GPU links. The relaxed dense log (a hundredth of the MLP parameters
per batch, spread over all devices) is left out.

`pool_schedule` describes one device, the busiest, and the shared levels for the closed form;
`pool_schedule_explicit` names every device and switch for the event-driven engine.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from trainingcxl.sim.closed_form import solve
from trainingcxl.sim.errors import parameter_error
from trainingcxl.sim.hardware import Hardware
from trainingcxl.sim.parameters import number, whole
from trainingcxl.sim.phases import Phases
from trainingcxl.sim.schedule import Edge, Part, Resource, Schedule, Stage, Step
from trainingcxl.sim.systems import SYSTEMS
from trainingcxl.sim.workload import Model

__all__ = [
    "DEVICES_MAX",
    "Fabric",
    "PoolPoint",
    "pool_point",
    "pool_schedule",
    "pool_schedule_explicit",
    "pool_sweep",
]

_SATURATED = 0.9
DEVICES_MAX = 4095  # CXL 3.0: devices below one root complex


@dataclass(frozen=True, slots=True, kw_only=True)
class Fabric:
    """Expanders and GPUs and the switches between them.

    Attributes:
        devices: Memory expanders (CXL-MEM).
        gpus: GPUs, each on a link of its own at the root switch.
        radix: Devices or switches below one switch.
        uplinks: Parallel links from a switch to the level above.
        switch_gbps: What one switch moves in each direction.
    """

    devices: int = whole(1, DEVICES_MAX, "devices")
    gpus: int = whole(1, 1024, "GPUs")
    radix: int = whole(2, 256, "ports")
    uplinks: int = whole(1, 256, "links")
    switch_gbps: float = number(0, 1e6, "GB/s", above=True)

    def __post_init__(self) -> None:
        limits = (("devices", 1, DEVICES_MAX), ("gpus", 1, 1024), ("radix", 2, 256))
        for name, low, high in (*limits, ("uplinks", 1, 256)):
            value = getattr(self, name)
            if not low <= value <= high:
                raise parameter_error(
                    f"key 'fabric.{name}' is {value}", where="fabric", do=f"[{low}, {high}]"
                )
        if not self.switch_gbps > 0:
            raise parameter_error(
                f"key 'fabric.switch_gbps' is {self.switch_gbps}", where="fabric", do="above 0 GB/s"
            )

    @property
    def below(self) -> tuple[int, ...]:
        """Devices below one switch of each level, from the leaves to the root."""
        found, size = [], 1
        while size < self.devices:
            size *= self.radix
            found.append(min(size, self.devices))
        return tuple(found) or (1,)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPoint:
    """A model of one pool size: time, throughput, and how busy each kind of unit is."""

    fabric: Fabric
    seconds_per_batch: float
    samples_per_second: float
    utilisation: dict[str, float]

    @property
    def limit(self) -> str:
        """The busiest kind of unit, or "dependencies" when nothing is above 90 %.

        A link is busy in one direction, then in the other, as vectors and gradients of one batch
        cannot overlap; so the directions count together.
        """
        name, share = max(self.utilisation.items(), key=lambda item: item[1])
        if share >= _SATURATED:
            return name
        turns = {
            up[: -len(" up")]: value + self.utilisation.get(up[: -len("up")] + "down", 0.0)
            for up, value in self.utilisation.items()
            if up.endswith(" up")
        }
        name, share = max(turns.items(), key=lambda item: item[1])
        return f"{name}, up and down in turn" if share >= _SATURATED else "dependencies"


@dataclass(frozen=True, slots=True)
class _Loads:
    """Work of one batch on each device, in units of the whole model."""

    tables: tuple[float, ...]  # share of all lookups that each device serves
    partial: float  # vectors sent over vectors needed


def _loads(fabric: Fabric, model: Model) -> _Loads:
    devices, tables = fabric.devices, model.num_tables
    if devices <= tables:
        counts = [tables // devices + (d < tables % devices) for d in range(devices)]
        return _Loads(tuple(c / tables for c in counts), 1.0)
    stripes = [devices // tables + (t < devices % tables) for t in range(tables)]
    shares = [1.0 / (tables * s) for s in stripes for _ in range(s)]
    lookups = model.lookups / model.batch / tables
    # A device sends a partial sum for every bag that has at least one row on it.
    hit = [s * (1.0 - (1.0 - 1.0 / s) ** lookups) for s in stripes]
    return _Loads(tuple(shares), sum(hit) / tables)


class _PoolPhases:
    """Costs of the relaxed schedule on a fabric, per unit of share."""

    def __init__(self, fabric: Fabric, hardware: Hardware, model: Model) -> None:
        self.fabric = fabric
        self.hardware = hardware
        self.model = model
        self.loads = _loads(fabric, model)
        self.phases = Phases(SYSTEMS["CXL"], hardware, model)
        self.levels = fabric.below

    def scaled(self, step: Step, share: float, *, device: str = "") -> Step:
        """Return a step on one device with `share` of the lookups of all GPUs' batches."""
        factor = share * self.fabric.gpus
        stages = tuple(
            replace(
                stage,
                resource=f"{stage.resource}{device}",
                parts=tuple(replace(p, units=p.units * factor) for p in stage.parts),
            )
            for stage in step.stages
        )
        return replace(step, name=f"{step.name}{device}", stages=stages)

    def bytes_of(self, share: float) -> float:
        """Bytes that a device with `share` of the tables sends, and receives, per batch.

        A bag's gradient goes to every device that sent a partial sum of it, so both ways are equal.
        """
        return self.model.pooled_bytes * self.fabric.gpus * share * self.loads.partial

    def path(self, moved: float, *, up: bool, places: Sequence[str]) -> tuple[Stage, ...]:
        """Stages of a transfer: device link, then switches and their uplinks, then GPU links.

        `places` names the switch at each level that the transfer passes.
        """
        link = 1e-9 / self.hardware.link.bandwidth_gbps
        inside = 1e-9 / self.fabric.switch_gbps
        way = "up" if up else "down"

        def stage(resource: str, seconds: float) -> Stage:
            return Stage(f"{resource} {way}", (Part("send", moved, seconds, 1.0),))

        stages = [stage(places[0], link)]
        for level, name in enumerate(places[1:]):
            stages.append(stage(f"switch{name}", inside))
            if level + 1 < len(self.levels):
                stages.append(stage(f"uplink{name}", link / self.fabric.uplinks))
        stages.append(stage("GPU link", link))
        return tuple(stages if up else reversed(stages))

    @property
    def latency_s(self) -> float:
        """Start-up of a transfer and one hop for each switch level beyond the first."""
        link = self.hardware.link
        return link.start_s + (len(self.levels) - 1) * link.hop_ns * 1e-9

    def allreduce(self) -> Step:
        """Average the dense gradients of all GPUs over a ring."""
        gpus = self.fabric.gpus
        moved = 2.0 * self.model.dense_bytes * (gpus - 1)
        seconds = 1e-9 / self.hardware.link.bandwidth_gbps
        stage = Stage("GPU link down", (Part("send", moved, seconds, 1.0),))
        return Step(
            name="allreduce", category="transfer", stages=(stage,), latency_s=self.latency_s
        )


def _resources(steps: Sequence[Step], fabric: Fabric, hardware: Hardware) -> dict[str, Resource]:
    found = {}
    for name in dict.fromkeys(stage.resource for step in steps for stage in step.stages):
        servers = 1
        if name.startswith(("channel", "logic")):
            servers = hardware.expander.channels
        elif name.startswith("GPU link"):
            servers = fabric.gpus
        found[name] = Resource(servers=servers)
    return found


def _assemble(
    costs: _PoolPhases, devices: Sequence[tuple[str, float, Sequence[str]]]
) -> list[Step]:
    """Build the steps for the given devices: (suffix, share of the tables, places passed)."""
    groups: list[list[Step]] = [[], [], [], [], [], []]
    for suffix, share, places in devices:
        for group, step in zip(groups, _device_steps(costs, suffix, share, places), strict=True):
            group.append(step)
    lookups, vectors, corrections, gradients, logs, updates = groups
    bottom = replace(costs.phases.bottom_forward(), after=(Edge("bottom_backward", 1),))
    top = replace(costs.phases.top(), after=tuple(Edge(c.name) for c in corrections))
    if costs.fabric.gpus > 1:
        gradients = [*gradients, replace(costs.allreduce(), after=(Edge("top"),))]
    arrived = tuple(Edge(g.name) for g in gradients)
    backward = replace(costs.phases.bottom_backward(), after=arrived)
    return [*lookups, bottom, *vectors, *corrections, top, *gradients, *logs, backward, *updates]


def _device_steps(
    costs: _PoolPhases, suffix: str, share: float, places: Sequence[str]
) -> tuple[Step, Step, Step, Step, Step, Step]:
    """Return lookup, vectors, correction, gradients, log and update of one device."""
    moved = costs.bytes_of(share)
    lookup = costs.scaled(costs.phases.lookup(), share, device=suffix)
    log = costs.scaled(costs.phases.log_rows()[0], share, device=suffix)
    update = costs.scaled(costs.phases.update(), share, device=suffix)
    vectors, correct, gradients = (f"{n}{suffix}" for n in ("vectors", "correct", "gradients"))

    def transfer(name: str, amount: float, up: bool, *after: Edge) -> Step:
        stages = costs.path(amount, up=up, places=places)
        latency = costs.latency_s
        return Step(name=name, category="transfer", stages=stages, latency_s=latency, after=after)

    corrected = moved * SYSTEMS["CXL"].correction
    previous = Edge(update.name, 1)
    return (
        replace(lookup, after=(Edge(lookup.name, 1), Edge(update.name, 2)), ahead=1),
        transfer(vectors, moved, True, Edge(lookup.name), Edge("bottom_forward")),
        transfer(correct, corrected, True, Edge(vectors), Edge(gradients, 1)),
        transfer(gradients, moved, False, Edge("top")),
        replace(log, after=(Edge(lookup.name), previous)),
        replace(update, after=(Edge(gradients), Edge(log.name))),
    )


def pool_schedule(fabric: Fabric, hardware: Hardware, model: Model) -> Schedule:
    """Describe one batch by the busiest device and the busiest switch of each level.

    The schedule's device resources stand for the busiest one; GPU links are all of them together.
    """
    costs = _PoolPhases(fabric, hardware, model)
    share = max(costs.loads.tables)
    places = [" device link", *(f" {level}" for level in range(len(costs.levels)))]
    steps = _assemble(costs, [("", share, places)])
    busiest = _level_loads(costs)

    def widen(step: Step) -> Step:
        """A shared stage carries the traffic of all devices below it, not of one."""
        if step.name == "allreduce":
            return step
        stages = []
        for stage in step.stages:
            factor = busiest.get(stage.resource.rsplit(" ", 1)[0], 1.0)
            parts = tuple(replace(p, units=p.units * factor) for p in stage.parts)
            stages.append(replace(stage, parts=parts))
        return replace(step, stages=tuple(stages))

    steps = [widen(s) for s in steps]
    return Schedule(
        system=f"CXL pool of {fabric.devices}",
        steps=tuple(steps),
        resources=_resources(steps, fabric, hardware),
    )


def _level_loads(costs: _PoolPhases) -> dict[str, float]:
    """Traffic of each shared unit over that of the busiest device."""
    shares = costs.loads.tables
    top = max(shares)
    factors = {"GPU link": sum(shares) / top}
    for level, size in enumerate(costs.levels):
        group = max(sum(shares[i : i + size]) for i in range(0, len(shares), size))
        factors[f"switch {level}"] = factors[f"uplink {level}"] = group / top
    return factors


def pool_schedule_explicit(fabric: Fabric, hardware: Hardware, model: Model) -> Schedule:
    """Describe one batch with every device, switch and uplink by name, for the event engine."""
    costs = _PoolPhases(fabric, hardware, model)
    devices = []
    for index, share in enumerate(costs.loads.tables):
        places = [f" device link {index}"]
        places += [f" {level}.{index // size}" for level, size in enumerate(costs.levels)]
        devices.append((f" {index}", share, places))
    steps = _assemble(costs, devices)
    return Schedule(
        system=f"CXL pool of {fabric.devices}, explicit",
        steps=tuple(steps),
        resources=_resources(steps, fabric, hardware),
    )


def pool_point(fabric: Fabric, hardware: Hardware, model: Model) -> PoolPoint:
    """Solve one pool size in closed form.

    Raises:
        ParameterError: The tables do not fit the expanders.
    """
    room = fabric.devices * hardware.pool.capacity_bytes
    if model.table_bytes > room:
        raise parameter_error(
            f"model '{model.name}' has {model.table_bytes / 1e9:.1f} GB of tables",
            where=f"fabric of {fabric.devices} devices",
            do=f"allowed: up to {room / 1e9:.1f} GB; add devices",
        )
    schedule = pool_schedule(fabric, hardware, model)
    seconds = solve(schedule).seconds_per_batch
    busy: dict[str, float] = {}
    for step in schedule.steps:
        for stage in step.stages:
            busy[stage.resource] = busy.get(stage.resource, 0.0) + schedule.stage_seconds(stage)
    return PoolPoint(
        fabric=fabric,
        seconds_per_batch=seconds,
        samples_per_second=fabric.gpus * model.batch / seconds,
        utilisation={name.strip(): min(b / seconds, 1.0) for name, b in busy.items()},
    )


def pool_sweep(
    fabric: Fabric, hardware: Hardware, model: Model, counts: Iterable[int]
) -> list[PoolPoint]:
    """Solve several device counts in closed form."""
    return [pool_point(replace(fabric, devices=n), hardware, model) for n in counts]
