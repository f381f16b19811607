"""What a profile keeps of its batches: exclusive times, rows, bytes. No torch, no clock."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

__all__ = ["STEP_PHASES", "BatchRecord", "Span", "Totals", "exclusive_ns"]

# The trainer's phases in a step's order; phases that a loop names itself follow.
STEP_PHASES = (
    "load",
    "announce",
    "lookup",
    "correct",
    "dense_forward",
    "loss",
    "dense_backward",
    "dense_update",
    "prepare",
    "sort",
    "journal_wait",
    "flag_wait",
    "dense_wait",
    "early_wait",
    "log",
    "reduce",
    "update",
    "commit",
    "dense_capture",
    "evaluation",
    "loop",
    "profile",
)
TRAINER = "trainer"


class Span(NamedTuple):
    """A phase of one thread, nanoseconds of the monotonic clock; batch 0 is none."""

    phase: str
    track: str
    batch: int
    begin: int
    end: int


@dataclass(slots=True)
class BatchRecord:
    """One batch: nanoseconds of each phase, which add up to those of the step, and counts."""

    batch: int
    begin: int
    end: int
    phases: dict[str, float]
    counts: dict[str, float]


@dataclass(slots=True)
class Totals:
    """Sums over batches."""

    batches: int = 0
    step_ns: int = 0
    phases: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    background: dict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))
    counts: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, record: BatchRecord) -> None:
        """Count one batch more."""
        self.batches += 1
        self.step_ns += record.end - record.begin
        for name, spent in record.phases.items():
            self.phases[name] += spent
        for name, value in record.counts.items():
            self.counts[name] += value

    def ordered_phases(self) -> list[str]:
        """Names of the phases that took time, in a step's order."""
        named = [name for name in STEP_PHASES if name in self.phases]
        return named + sorted(set(self.phases) - set(named))


def exclusive_ns(spans: Iterable[Span], counts: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Time of each phase without the phases inside it.

    Args:
        spans: Of one thread, each wholly inside another or beside it.
        counts: Of the batches among them, with the sampled shares of the update's time.

    Returns:
        Nanoseconds by phase. They add up to the time that the outermost spans cover. What happens
        during an evaluation is evaluation.
    """
    found: dict[str, float] = defaultdict(float)
    stack: list[tuple[str, int]] = []
    for span in sorted(spans, key=lambda s: (s.begin, -s.end)):
        while stack and stack[-1][1] <= span.begin:
            stack.pop()
        name, end = span.phase, span.end
        if stack:
            outer, outer_end = stack[-1]
            end = min(end, outer_end)
            name = outer if outer == "evaluation" else name
            found[outer] -= end - span.begin
        found[name] += end - span.begin
        stack.append((name, end))
    shares = list(counts)
    if found.get("update") and shares:
        whole = found["update"]
        log = whole * sum(c["log_share"] for c in shares) / len(shares)
        reduce = whole * sum(c["reduce_share"] for c in shares) / len(shares)
        found["log"] += log
        found["reduce"] += reduce
        found["update"] = whole - log - reduce
    return {name: spent for name, spent in found.items() if spent}
