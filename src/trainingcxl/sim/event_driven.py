"""Event-driven engine: chunks move through shared servers on a SimPy clock.

It runs the same schedule as the closed form but never computes a phase total: a step is cut into
chunks, each chunk queues for one server per stage, and a step ends when its last chunk leaves. A
queue serves the earlier batch first (less what a step is `ahead`), then the earlier step of the
schedule, then the earlier chunk; a chunk in service is not interrupted. Steps that share the first
word of their name (the same phase on several devices) are equals: their chunks take turns.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import simpy

from trainingcxl.sim.closed_form import ROUNDS, Solution, Span
from trainingcxl.sim.errors import ConservationError
from trainingcxl.sim.schedule import Resource, Schedule, Stage, Step

__all__ = ["EventRun", "Ledger", "run_events"]

_SLACK = 1e-9
_STEADY_BATCHES = 5


@dataclass(slots=True)
class Ledger:
    """What one resource did: bytes of chunks that entered and left, and busy server-seconds."""

    bytes_in: float = 0.0
    bytes_out: float = 0.0
    busy_s: float = 0.0
    servers: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class EventRun:
    """Result of an event-driven run: the steady solution and the ledger of every resource."""

    solution: Solution
    total_s: float
    ledgers: dict[str, Ledger]
    num_chunks: int


class _Server:
    """One server with a priority queue; non-preemptive."""

    __slots__ = ("env", "is_busy", "ledger", "order", "queue")

    def __init__(self, env: simpy.Environment, ledger: Ledger) -> None:
        self.env = env
        self.ledger = ledger
        self.queue: list[tuple[tuple[int, int, int], int, float, float, Callable[[], None]]] = []
        self.order = 0
        self.is_busy = False

    def submit(
        self, priority: tuple[int, int, int], seconds: float, moved: float, done: Callable[[], None]
    ) -> None:
        self.ledger.bytes_in += moved
        self.order += 1
        heapq.heappush(self.queue, (priority, self.order, seconds, moved, done))
        if not self.is_busy:
            self._serve()

    def _serve(self) -> None:
        _, _, seconds, moved, done = heapq.heappop(self.queue)
        self.is_busy = True
        timeout = self.env.timeout(seconds)

        def left(_: simpy.Event) -> None:
            self.ledger.busy_s += seconds
            self.ledger.bytes_out += moved
            self.is_busy = False
            done()
            if self.queue and not self.is_busy:
                self._serve()

        assert timeout.callbacks is not None
        timeout.callbacks.append(left)


@dataclass(slots=True)
class _Plan:
    """Chunks of one step: per stage, the server index, seconds and bytes of each chunk."""

    step: Step
    stages: list[tuple[str, list[int], list[float], list[float]]] = field(default_factory=list)
    num_chunks: int = 1


def _shares(stage: Stage, count: int, resource: Resource) -> list[float]:
    """Relative size of each chunk; chunks of the busiest server (server 0) are larger."""
    if stage.weights and len(stage.weights) == count:
        total = sum(stage.weights)
        return [w / total for w in stage.weights]
    servers, balance = resource.servers, min(stage.balance, resource.servers)
    if servers == 1:
        return [1.0 / count] * count
    others = (servers - balance) / (servers - 1)
    return [(balance if i % servers == 0 else others) / count for i in range(count)]


def _plan(schedule: Schedule, step: Step, rounds: int) -> _Plan:
    widest = max(schedule.resources[s.resource].servers for s in step.stages)
    weighted = step.stages[0].weights
    count = len(weighted) if weighted else rounds * widest
    if all(part.kind == "call" for stage in step.stages for part in stage.parts):
        count = max(1, round(sum(part.units for part in step.stages[0].parts)))
    plan = _Plan(step, num_chunks=count)
    for stage in step.stages:
        resource = schedule.resources[stage.resource]
        shares = _shares(stage, count, resource)
        seconds, moved = [0.0] * count, [0.0] * count
        for part in stage.parts:
            for i, share in enumerate(shares):
                units = part.units * share
                seconds[i] += units * part.unit_seconds / resource.speed
                moved[i] += units * part.unit_bytes
        servers = [i % resource.servers for i in range(count)]
        plan.stages.append((stage.resource, servers, seconds, moved))
    return plan


def _extend(intervals: list[tuple[float, float]], start: float, end: float) -> None:
    """Add an interval that ends no earlier than those before; overlapping ones become one."""
    while intervals and start <= intervals[-1][1] * (1.0 + 1e-12):
        start = min(start, intervals.pop()[0])
    intervals.append((start, end))


class _Runner:
    def __init__(self, schedules: Sequence[Schedule], batches: int, rounds: int) -> None:
        self.env = simpy.Environment()
        self.batches = batches
        first = schedules[0]
        self.ledgers = {n: Ledger(servers=r.servers) for n, r in first.resources.items()}
        self.servers = {
            name: [_Server(self.env, self.ledgers[name]) for _ in range(resource.servers)]
            for name, resource in first.resources.items()
        }
        self.plans = [[_plan(s, step, rounds) for step in s.steps] for s in schedules]
        self.index = {step.name: i for i, step in enumerate(first.steps)}
        kinds = list(dict.fromkeys(step.name.split(" ")[0] for step in first.steps))
        self.rank = {s.name: kinds.index(s.name.split(" ")[0]) for s in first.steps}
        self.waiting: dict[tuple[int, str], int] = {}
        self.released: dict[tuple[int, str], list[tuple[int, str]]] = {}
        self.starts: dict[tuple[int, str], float] = {}
        self.active: dict[tuple[int, str], list[tuple[float, float]]] = {}
        self.spans: list[Span] = []
        self.num_chunks = 0

    def run(self) -> None:
        roots = []
        for batch in range(self.batches):
            for plan in self.plans[batch % len(self.plans)]:
                key = (batch, plan.step.name)
                count = 0
                for edge in plan.step.after:
                    if edge.batches_back <= batch:
                        self.released.setdefault((batch - edge.batches_back, edge.step), []).append(
                            key
                        )
                        count += 1
                self.waiting[key] = count
                if not count:
                    roots.append(key)
        for key in roots:
            self._start(key)
        self.env.run()

    def _start(self, key: tuple[int, str]) -> None:
        batch, name = key
        plan = self.plans[batch % len(self.plans)][self.index[name]]
        self.starts[key] = self.env.now
        if plan.step.latency_s == 0.0:
            # At once: a queue must see this step before it takes one of lower priority.
            self._release_chunks(key, plan)
            return
        timeout = self.env.timeout(plan.step.latency_s)
        assert timeout.callbacks is not None
        timeout.callbacks.append(lambda _: self._release_chunks(key, plan))

    def _release_chunks(self, key: tuple[int, str], plan: _Plan) -> None:
        batch, rank = key[0] - plan.step.ahead, self.rank[key[1]]
        left = [plan.num_chunks]
        self.num_chunks += plan.num_chunks
        active = self.active.setdefault(key, [])
        if plan.step.latency_s:
            active.append((self.starts[key], self.env.now))
        last = len(plan.stages)

        def visit(chunk: int, stage: int) -> None:
            if stage == last:
                left[0] -= 1
                if left[0] == 0:
                    self._finish(key)
                return
            resource, servers, seconds, moved = plan.stages[stage]
            server = self.servers[resource][servers[chunk]]

            def served() -> None:
                _extend(active, self.env.now - seconds[chunk], self.env.now)
                visit(chunk, stage + 1)

            server.submit((batch, rank, chunk), seconds[chunk], moved[chunk], served)

        for chunk in range(plan.num_chunks):
            visit(chunk, 0)

    def _finish(self, key: tuple[int, str]) -> None:
        active = tuple(self.active.pop(key))
        self.spans.append(Span(key[0], key[1], self.starts[key], self.env.now, active))
        for waiter in self.released.get(key, ()):
            self.waiting[waiter] -= 1
            if self.waiting[waiter] == 0:
                self._start(waiter)


def run_events(
    schedules: Schedule | Sequence[Schedule], *, batches: int = 8, rounds: int = ROUNDS
) -> EventRun:
    """Run batches through the event-driven engine.

    Args:
        schedules: One schedule for all batches, or one per batch (repeated when fewer), as exact
            row traces give.
        batches: Number of batches, at least 1.
        rounds: Chunks per server and stage.

    Returns:
        Steady seconds per batch (the first and the last quarter are left out; of
            fewer than five batches the plain average), ledgers, spans.

    Raises:
        ConservationError: Bytes in and out of a resource differ, or it was busy for too long.
    """
    many = [schedules] if isinstance(schedules, Schedule) else list(schedules)
    runner = _Runner(many, batches, rounds)
    runner.run()
    demanded: dict[str, float] = {}
    for batch in range(batches):
        for step in many[batch % len(many)].steps:
            for stage in step.stages:
                moved = sum(part.units * part.unit_bytes for part in stage.parts)
                demanded[stage.resource] = demanded.get(stage.resource, 0.0) + moved
    check_conservation(runner.ledgers, demanded, runner.env.now)
    finished = [0.0] * batches
    for span in runner.spans:
        finished[span.batch] = max(finished[span.batch], span.end_s)
    return EventRun(
        solution=_steady(finished, tuple(runner.spans)),
        total_s=runner.env.now,
        ledgers=runner.ledgers,
        num_chunks=runner.num_chunks,
    )


def check_conservation(
    ledgers: dict[str, Ledger], demanded: dict[str, float], elapsed: float
) -> None:
    """Check that every byte demanded entered and left each resource, and busy <= time.

    Raises:
        ConservationError: They do not; the message names resource and amounts.
    """
    for name, ledger in ledgers.items():
        wanted = demanded.get(name, 0.0)
        slack = 1.0 + _SLACK * wanted
        if abs(ledger.bytes_in - ledger.bytes_out) > slack or abs(ledger.bytes_in - wanted) > slack:
            raise ConservationError(
                f"resource '{name}' was given {wanted:.0f} bytes, {ledger.bytes_in:.0f} entered "
                f"and {ledger.bytes_out:.0f} left"
                "\n  do:    report this schedule, its result is void"
            )
        room = elapsed * ledger.servers
        if ledger.busy_s > room * (1.0 + _SLACK):
            raise ConservationError(
                f"resource '{name}' was busy {ledger.busy_s:.6g} s of {room:.6g} server-seconds"
                "\n  do:    report this schedule, its result is void"
            )


def _steady(finished: list[float], spans: tuple[Span, ...]) -> Solution:
    """Average over the middle of the run: the pipeline is neither filling nor draining."""
    batches = len(finished)
    skip = batches // 4
    # Patterns that alternate between two batches are averaged over an even number of them.
    first = skip
    last = first + (batches - 1 - 2 * skip) // 2 * 2
    if batches < _STEADY_BATCHES:  # too few to tell filling from steady: the plain average
        period = finished[-1] / batches
        return Solution(
            seconds_per_batch=period,
            first_batch_s=finished[0],
            window=(0.0, finished[-1]),
            spans=spans,
        )
    period = (finished[last] - finished[first]) / (last - first)
    return Solution(
        seconds_per_batch=period,
        first_batch_s=finished[0],
        window=(finished[last - 1], finished[last - 1] + period),
        spans=spans,
    )
