"""Closed form: the fluid solution of a schedule, evaluated step by step in priority order.

Each step starts when its dependencies are complete and takes its work over the rate of its slowest
stage, plus the fill of the other stages. A step of higher priority is placed first; a later one
uses what its resource has left. For the named systems this gives the formulas of
`docs/simulator.md`, as T = max(A, Bf) + X + Tt + X + max(Up, Bb) + Lg + Ml for CXL-D; tests
compare them.
"""

from bisect import bisect_right
from dataclasses import dataclass

from trainingcxl.sim.schedule import Schedule, Step

__all__ = ["ROUNDS", "Solution", "Span", "solve"]

ROUNDS = 16  # chunks per server and stage, the same in both engines
_BATCHES_MAX = 48
_LOOK_AHEAD = 2  # batches after the steady window, whose early steps fall into it
_TOLERANCE = 1e-9


@dataclass(frozen=True, slots=True)
class Span:
    """When one step of one batch ran, seconds from the start of the run.

    `active` are the times within it at which the step was served and not waiting for a resource.
    """

    batch: int
    step: str
    start_s: float
    end_s: float
    active: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """What an engine found: steady seconds per batch, first batch, and when steps ran."""

    seconds_per_batch: float
    first_batch_s: float
    window: tuple[float, float]
    spans: tuple[Span, ...]


class _Track:
    """Busy intervals of one resource, sorted and disjoint."""

    def __init__(self) -> None:
        self.starts: list[float] = []
        self.ends: list[float] = []

    def reserve(self, ready: float, seconds: float) -> list[tuple[float, float]]:
        """Take `seconds` of free time from `ready` on; return the intervals taken, at least one."""
        index = first = bisect_right(self.ends, ready)
        now, done = ready, 0.0
        taken = []
        while index < len(self.starts):
            gap = max(self.starts[index] - now, 0.0)
            if gap >= seconds - done:
                break
            if gap > 0.0:
                taken.append((now, now + gap))
            done += gap
            now = max(now, self.ends[index])
            index += 1
        end = now + (seconds - done)
        taken.append((now, end))
        # Everything from the first touched interval to the end is busy now.
        start = min(ready, self.starts[first]) if index > first else ready
        self.starts[first:index] = [start]
        self.ends[first:index] = [end]
        return taken


def _place(
    tracks: dict[str, _Track], times: list[tuple[str, float]], ready: float
) -> list[tuple[float, float]]:
    """Place the pipelined stages of one step; return the intervals of the stage that ends last.

    A stage cannot run ahead of the one before it: where that one resumes at t with a fraction f
    done, this one cannot have done more than f by then.
    """
    last = [(ready, ready)]
    for position, (resource, seconds) in enumerate(times):
        taken = tracks[resource].reserve(ready, seconds)
        if taken[-1][1] >= last[-1][1]:
            last = taken
        if position + 1 < len(times) and seconds > 0.0:
            pace = times[position + 1][1] / seconds
            done = 0.0
            for start, end in taken:
                ready = max(ready, start - done * pace)
                done += end - start
    return last


def step_seconds(schedule: Schedule, step: Step, *, rounds: int = ROUNDS) -> float:
    """Return how long a step takes alone: start, slowest stage, and the fill of the others."""
    times = [schedule.stage_seconds(stage) for stage in step.stages]
    longest = max(times)
    return step.latency_s + longest + (sum(times) - longest) / rounds


def solve(schedule: Schedule, *, rounds: int = ROUNDS) -> Solution:
    """Solve a schedule for its steady state.

    Args:
        schedule: Steps and resources of one batch.
        rounds: Chunks per server; only the fill of pipelined stages depends on it.

    Returns:
        Seconds per batch in steady state, and the spans of all batches evaluated.
    """
    tracks = {name: _Track() for name in schedule.resources}
    plan = []
    for step in schedule.steps:
        times = [(s.resource, schedule.stage_seconds(s)) for s in step.stages]
        longest = max(t for _, t in times)
        fill = (sum(t for _, t in times) - longest) / rounds
        plan.append((step, times, fill))
    ahead = max(step.ahead for step, _, _ in plan)
    ends: list[dict[str, float]] = [{} for _ in range(_BATCHES_MAX + ahead)]
    spans: list[Span] = []
    finished: list[float] = []
    for turn in range(-ahead, _BATCHES_MAX):
        begun = float("inf")
        for step, times, fill in plan:
            batch = turn + step.ahead
            if batch < 0:
                continue
            ready = 0.0
            for edge in step.after:
                if edge.batches_back <= batch:
                    ready = max(ready, ends[batch - edge.batches_back][edge.step])
            begun = min(begun, ready)
            active = _place(tracks, times, ready + step.latency_s)
            end = active[-1][1] + fill
            active[0] = (active[0][0] - step.latency_s, active[0][1])
            active[-1] = (active[-1][0], end)
            ends[batch][step.name] = end
            spans.append(Span(batch, step.name, ready, end, tuple(active)))
        if turn < 0:
            continue
        finished.append(max(ends[turn].values()))
        if turn >= 2 and begun >= finished[-2]:
            # This batch began when the last one had ended: all batches are alike from here on.
            return _steady(finished, spans, look_ahead=0)
        if _is_steady(finished):
            break
    return _steady(finished, spans, look_ahead=_LOOK_AHEAD)


def _is_steady(finished: list[float]) -> bool:
    """True when four consecutive batches took equally long."""
    if len(finished) < 4 + 2 * _LOOK_AHEAD:
        return False
    last = [b - a for a, b in zip(finished[-5:-1], finished[-4:], strict=True)]
    return max(last) - min(last) <= _TOLERANCE * max(last)


def _steady(finished: list[float], spans: list[Span], *, look_ahead: int) -> Solution:
    # Alternating patterns never become equal; an average over an even number of batches is exact.
    count = (len(finished) - 1) // 2 // 2 * 2 or 1
    period = (finished[-1] - finished[-1 - count]) / count
    start = finished[-2 - look_ahead]
    return Solution(
        seconds_per_batch=period,
        first_batch_s=finished[0],
        window=(start, start + period),
        spans=tuple(spans),
    )
