"""The systems of the paper's evaluation, each a set of switches, and the schedule they give.

Read `build_schedule` first: it lists the steps of a batch in order with what each waits for. The
costs of single steps are in `phases.py`.
"""

from dataclasses import dataclass, replace

from trainingcxl.sim.errors import parameter_error
from trainingcxl.sim.hardware import Hardware
from trainingcxl.sim.parameters import nearest
from trainingcxl.sim.phases import Phases
from trainingcxl.sim.schedule import Edge, Resource, Schedule, Step
from trainingcxl.sim.workload import Model

__all__ = ["SYSTEMS", "System", "build_schedule", "check_capacity", "find_system", "pool_medium"]


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """Which ideas of the paper are switched on.

    Attributes:
        name: As printed in the paper.
        medium: Medium of the tables; empty takes `expander.medium`.
        near_memory: Computing logic beside the memory does lookup and update; else the host CPU.
        hardware_movement: DCOH flushes results over CXL.cache; else the host copies them.
        batch_aware_log: Undo log in the background, before the update; else a redo log at the end.
        relaxed_lookup: Lookup of N+1 before the update of N, corrected afterwards.
        relaxed_dense_log: MLP parameters are logged once in `dense_every` batches, spread evenly.
        has_checkpoint: False trains without any log.
        host_bounced_log: Without checkpointing logic, rows cross the link twice to be logged.
        dense_every: Batches over which one dense log is spread when relaxed.
        correction: Share of the reduced vectors sent again by a relaxed lookup.
    """

    name: str
    medium: str = ""
    near_memory: bool = False
    hardware_movement: bool = False
    batch_aware_log: bool = False
    relaxed_lookup: bool = False
    relaxed_dense_log: bool = False
    has_checkpoint: bool = True
    host_bounced_log: bool = True
    dense_every: int = 100
    correction: float = 0.5

    @property
    def num_ideas(self) -> int:
        """Number of ideas switched on."""
        return sum(
            (
                self.near_memory,
                self.hardware_movement,
                self.batch_aware_log,
                self.relaxed_lookup,
                self.relaxed_dense_log,
            )
        )


_CXL_D = System(name="CXL-D", near_memory=True, hardware_movement=True)
_CXL_B = replace(_CXL_D, name="CXL-B", batch_aware_log=True)

SYSTEMS: dict[str, System] = {
    system.name: system
    for system in (
        System(name="SSD", medium="ssd"),
        System(name="PMEM", medium="pmem"),
        System(name="DRAM", medium="dram"),
        System(name="PCIe", near_memory=True),
        _CXL_D,
        _CXL_B,
        replace(_CXL_B, name="CXL", relaxed_lookup=True, relaxed_dense_log=True),
    )
}


def find_system(name: str) -> System:
    """Return a named system; the case of the name does not matter."""
    for system in SYSTEMS.values():
        if system.name.lower() == name.lower():
            return system
    raise parameter_error(
        f"system {name!r} is unknown", where="--system", do=nearest(name, SYSTEMS)
    )


def pool_medium(system: System, hardware: Hardware) -> str:
    """Return the name of the medium that holds the tables."""
    return system.medium or hardware.expander.medium


def check_capacity(system: System, hardware: Hardware, model: Model) -> None:
    """Refuse a model whose tables do not fit the medium.

    Raises:
        ParameterError: The tables are larger than all modules of the medium.
    """
    name = pool_medium(system, hardware)
    room = hardware.media[name].capacity_bytes
    if model.table_bytes > room:
        raise parameter_error(
            f"model '{model.name}' has {model.table_bytes / 1e9:.1f} GB of tables, "
            f"media.{name} holds {room / 1e9:.1f} GB",
            where=f"media.{name}.modules = {hardware.media[name].modules}, "
            f"media.{name}.module_gb = {hardware.media[name].module_gb:g}",
            do=f"allowed: up to {room / 1e9:.1f} GB; raise media.{name}.modules or take fewer rows",
        )


def build_schedule(system: System, hardware: Hardware, model: Model) -> Schedule:
    """Describe one batch of `model` on `system`.

    Returns:
        The schedule; both engines run it.

    Raises:
        ParameterError: The model does not fit the medium.
    """
    check_capacity(system, hardware, model)
    phases = Phases(system, hardware, model)
    steps = [phases.lookup(), phases.bottom_forward()]
    steps += _chain(phases.to_gpu(), after=["lookup", "bottom_forward"])
    arrived = steps[-1].name
    if system.relaxed_lookup:
        steps.append(replace(phases.correction(), after=(Edge(arrived),)))
        arrived = "correct"
    steps.append(replace(phases.top(), after=(Edge(arrived),)))
    steps += _chain(phases.to_memory(), after=["top"])
    gradients = steps[-1].name
    backward = replace(phases.bottom_backward(), after=(Edge(gradients),))
    if not system.near_memory:
        steps.append(replace(phases.expand(), after=(Edge(gradients),)))
        gradients = "expand"
    update = replace(phases.update(), after=(Edge(gradients),))
    steps += _with_log(system, phases, update, backward)
    steps = _between_batches(system, steps)
    return Schedule(system=system.name, steps=tuple(steps), resources=_resources(steps, hardware))


def _chain(steps: list[Step], *, after: list[str]) -> list[Step]:
    chained = []
    for step in steps:
        chained.append(replace(step, after=tuple(Edge(name) for name in after)))
        after = [step.name]
    return chained


def _with_log(system: System, phases: Phases, update: Step, backward: Step) -> list[Step]:
    """Place the log: an undo log before the update (batch-aware), or a redo log after it."""
    if not system.has_checkpoint:
        return [backward, update]
    rows, dense = phases.log_rows(), phases.log_dense()
    if not system.batch_aware_log:
        log = _chain(rows + dense, after=["update", "bottom_backward"])
        return [backward, update, *log]
    if system.relaxed_dense_log:
        # The MLP log is served only while the GPU has finished the top MLP (paper).
        log = _chain(rows, after=["lookup"]) + _chain(dense, after=["top"])
        flags = [rows[-1].name]
    else:
        # Parameters may be overwritten, by the update or by SGD, only when both flags stand.
        log = _chain(rows + dense, after=["lookup"])
        flags = [dense[-1].name]
        backward = replace(backward, after=(*backward.after, *(Edge(f) for f in flags)))
    update = replace(update, after=(*update.after, *(Edge(f) for f in flags)))
    return [*log, backward, update]


def _between_batches(system: System, steps: list[Step]) -> list[Step]:
    """Add what a batch waits for in the batches before it."""
    waited_for = {edge.step for step in steps for edge in step.after}
    ends = tuple(Edge(s.name, 1) for s in steps if s.name not in waited_for)
    extra: dict[str, tuple[Edge, ...]]
    if not system.relaxed_lookup:
        extra = {"lookup": ends, "bottom_forward": ends}
    else:
        last_transfer = [s.name for s in steps if s.name.startswith("gradients")][-1]
        extra = {
            # At most one batch ahead of the updates, else throughput is overstated.
            "lookup": (Edge("lookup", 1), Edge("update", 2)),
            "bottom_forward": (Edge("bottom_backward", 1),),
            "correct": (Edge(last_transfer, 1),),
        }
        if system.has_checkpoint and system.batch_aware_log:
            # The undo log of N reads rows after the update of N-1: shared rows change there.
            first_log = next(s.name for s in steps if s.name.startswith("log_rows"))
            extra[first_log] = (Edge("update", 1),)
        elif system.has_checkpoint:
            extra["lookup"] = (*extra["lookup"], Edge(steps[-1].name, 2))
            extra["update"] = (Edge(steps[-1].name, 1),)
    found = [replace(s, after=(*s.after, *extra.get(s.name, ()))) for s in steps]
    if system.relaxed_lookup:
        # The memory serves the lookup of N+1 before the log and the update of N: else the GPU would
        # wait for it while memory and GPU are about equally busy.
        found[0] = replace(found[0], ahead=1)
    return found


def _resources(steps: list[Step], hardware: Hardware) -> dict[str, Resource]:
    channels = Resource(servers=hardware.expander.channels)
    names = dict.fromkeys(stage.resource for step in steps for stage in step.stages)
    return {n: channels if n in ("channel", "logic") else Resource() for n in names}
