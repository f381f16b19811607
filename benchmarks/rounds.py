"""Interleaved rounds, their statistics, and when they were disturbed (docs/performance.md).

Needs neither torch nor numpy: tests/unit/test_benchmarks.py tests it alone.
"""

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DISTURBED = 1.1  # wall over CPU time, of one thread
FOREIGN = 0.1  # of all cores, used by other processes


@dataclass
class Times:
    """Milliseconds a step in each kept round of one candidate."""

    wall_ms: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)

    @property
    def wall_over_cpu(self) -> float:
        """Median over rounds; CPU time is that of the whole process, all its threads."""
        pairs = zip(self.wall_ms, self.cpu_ms, strict=True)
        return statistics.median(wall / max(cpu, 1e-9) for wall, cpu in pairs)

    def as_dict(self) -> dict[str, Any]:
        """The rounds and their spread, for JSON."""
        return {
            "wall_ms": spread(self.wall_ms),
            "cpu_ms": spread(self.cpu_ms),
            "wall_over_cpu": self.wall_over_cpu,
        }


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Median, least, largest and the values themselves."""
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "values": list(values),
    }


def ratios(numerator: Sequence[float], denominator: Sequence[float]) -> list[float]:
    """Ratios within a round: neighbours in time share a noisy machine's noise."""
    return [n / d for n, d in zip(numerator, denominator, strict=True)]


class ForeignLoad:
    """Share of all cores that other processes (and the host of a virtual machine) took."""

    def __init__(self, stat: Path = Path("/proc/stat")) -> None:
        self._stat = stat
        self._busy = self._begin = self._own = 0.0
        self.restart()

    def restart(self) -> None:
        """Begin anew."""
        self._busy, self._begin, self._own = self._busy_seconds(), time.monotonic(), _own_seconds()

    def share(self) -> float:
        """Since the last restart; 0 where the system does not tell."""
        elapsed = time.monotonic() - self._begin
        if elapsed <= 0 or self._busy < 0:
            return 0.0
        foreign = self._busy_seconds() - self._busy - (_own_seconds() - self._own)
        return max(0.0, foreign / elapsed / (os.cpu_count() or 1))

    def _busy_seconds(self) -> float:
        try:
            fields = self._stat.read_text().splitlines()[0].split()[1:9]
        except OSError:
            return -1.0
        user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields)
        return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _own_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def interleave(
    candidates: Mapping[str, Callable[[int], object]],
    *,
    rounds: int,
    repeats: int = 1,
    steps: int = 1,
    lead_in: int = 0,
    warm_up: int = 1,
) -> dict[str, Times]:
    """Times A B C A B C ...; the first `warm_up` rounds are left out.

    Args:
        candidates: Called with a number that goes on from round to round, for fresh batches. One
            that returns a float has timed itself: wall seconds of the call.
        rounds: Kept rounds.
        repeats: Timed calls of a candidate in a round.
        steps: Of one call: times are of one step.
        lead_in: Calls before the timed ones: what a candidate finds in the caches is then its own.
        warm_up: Rounds before those that are kept.
    """
    times = {name: Times() for name in candidates}
    calls = lead_in + repeats
    for round_number in range(rounds + warm_up):
        for name, call in candidates.items():
            first = round_number * calls
            for k in range(first, first + lead_in):
                call(k)
            used, started = time.process_time(), time.perf_counter()
            told = [call(k) for k in range(first + lead_in, first + calls)]
            wall, cpu = time.perf_counter() - started, time.process_time() - used
            own = [seconds for seconds in told if isinstance(seconds, float)]
            if len(own) == repeats:
                wall = sum(own)
            if round_number >= warm_up:
                times[name].wall_ms.append(1e3 * wall / (repeats * steps))
                times[name].cpu_ms.append(1e3 * cpu / (repeats * steps))
    return times


def disturbance(times: Mapping[str, Times], *, threads: int | None, foreign: float) -> str:
    """Why these rounds count for nothing, or "".

    Args:
        times: The rounds.
        threads: Of the candidates: with one, wall time beyond CPU time was lost to others. None
            where candidates wait for a medium.
        foreign: Share of all cores that other processes took.
    """
    if threads == 1:
        for name, rounds in times.items():
            if rounds.wall_ms and rounds.wall_over_cpu > DISTURBED:
                return f"{name}: wall is {rounds.wall_over_cpu:.2f} of CPU time"
    if foreign > FOREIGN:
        return f"others took {foreign:.0%} of all cores"
    return ""
