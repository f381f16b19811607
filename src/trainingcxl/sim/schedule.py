"""The schedule description shared by both engines: steps, what they need, what they wait for.

A schedule is the work of one batch. A `Step` starts when all steps it is `after` are complete; an
edge may point to an earlier batch (`batches_back`). Its stages are a pipeline: the work is cut into
chunks, each chunk visits the stages in order. A stage holds one server of its resource per chunk.
Nothing here knows durations of phases; an engine derives them from units and seconds per unit.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from trainingcxl.sim.errors import parameter_error

__all__ = ["CATEGORIES", "Edge", "Part", "Resource", "Schedule", "Stage", "Step"]

CATEGORIES = ("top MLP", "bottom MLP", "transfer", "embedding", "checkpoint")


@dataclass(frozen=True, slots=True)
class Part:
    """One kind of work within a stage.

    Attributes:
        kind: read, write (media), send (link), compute (kernels, logic), call (driver).
        units: Amount: bytes, lines, pages, calls or kernel seconds.
        unit_seconds: Seconds one server needs per unit.
        unit_bytes: Bytes moved per unit, for the ledger of bytes and energy.
        medium: Medium that is read or written; empty for none.
    """

    kind: str
    units: float
    unit_seconds: float
    unit_bytes: float = 0.0
    medium: str = ""

    @property
    def seconds(self) -> float:
        """Seconds one server needs for all units."""
        return self.units * self.unit_seconds


@dataclass(frozen=True, slots=True)
class Stage:
    """Work of a step on one resource.

    `weights` are relative chunk sizes (empty: equal); the busiest server gets `balance` times the
    mean load.
    """

    resource: str
    parts: tuple[Part, ...]
    weights: tuple[float, ...] = ()
    balance: float = 1.0


@dataclass(frozen=True, slots=True)
class Edge:
    """Wait for `step` of the batch `batches_back` earlier."""

    step: str
    batches_back: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A phase of the batch.

    `is_host_driven`: the CPU runs it or polls for its end. `ahead`: where resources are wanted by
    several, the step counts as one of the batch so many earlier.
    """

    name: str
    category: str
    stages: tuple[Stage, ...]
    after: tuple[Edge, ...] = ()
    latency_s: float = 0.0
    is_host_driven: bool = False
    ahead: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Resource:
    """A number of equal servers (as channels), `speed` times as fast as the units say."""

    servers: int = 1
    speed: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Steps of one batch in priority order: where two want a resource, the earlier one has it."""

    system: str
    steps: tuple[Step, ...]
    resources: Mapping[str, Resource]

    def __post_init__(self) -> None:
        position = {step.name: index for index, step in enumerate(self.steps)}
        if len(position) != len(self.steps):
            raise parameter_error("two steps share a name", where=self.system, do="rename one")
        for step, edge in self.edges():
            if edge.step not in position:
                raise parameter_error(
                    f"step '{step.name}' waits for unknown step '{edge.step}'",
                    where=f"schedule {self.system}",
                    do="name a step of the schedule",
                )
            if edge.batches_back == 0 and position[edge.step] >= position[step.name]:
                raise parameter_error(
                    f"step '{step.name}' waits for the later step '{edge.step}'",
                    where=f"schedule {self.system}",
                    do="list steps after those they wait for",
                )

    def edges(self) -> Iterator[tuple[Step, Edge]]:
        """Yield every dependency with the step that waits."""
        for step in self.steps:
            for edge in step.after:
                yield step, edge

    def step(self, name: str) -> Step:
        """Return a step by name."""
        return next(s for s in self.steps if s.name == name)

    def without_edge(self, step: str, after: str) -> "Schedule":
        """Return the schedule in which `step` no longer waits for `after`."""
        steps = tuple(
            replace(s, after=tuple(e for e in s.after if e.step != after)) if s.name == step else s
            for s in self.steps
        )
        return replace(self, steps=steps)

    def with_speed(self, resource: str, speed: float) -> "Schedule":
        """Return the schedule with one resource `speed` times as fast."""
        changed = replace(self.resources[resource], speed=speed)
        return replace(self, resources={**self.resources, resource: changed})

    def with_seconds(self, measured: Mapping[str, float]) -> "Schedule":
        """Return the schedule in which the named steps take the given seconds on their resource."""

        def timed(step: Step) -> Step:
            if step.name not in measured:
                return step
            stages = []
            for stage in step.stages:
                total = sum(part.seconds for part in stage.parts)
                factor = measured[step.name] / total if total else 0.0
                parts = tuple(replace(p, unit_seconds=p.unit_seconds * factor) for p in stage.parts)
                stages.append(replace(stage, parts=parts))
            return replace(step, stages=tuple(stages))

        return replace(self, steps=tuple(timed(step) for step in self.steps))

    def stage_seconds(self, stage: Stage) -> float:
        """Time of a stage alone on its resource: the busiest server's share of the work."""
        resource = self.resources[stage.resource]
        work = sum(part.seconds for part in stage.parts)
        balance = min(stage.balance, resource.servers)
        return work * balance / (resource.servers * resource.speed)
