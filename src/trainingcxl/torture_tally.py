"""How lives of a tortured training end, and what was seen of it."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["GROWTH_POINTS", "Kill", "Reference", "Tally", "percentile"]

# Named places of csrc/crash_point.h.
GROWTH_POINTS = ("log: space allocated", "geometry: records")
_CUT_POINTS = ("journal: slot", "journal: slot written")


@dataclass(frozen=True, kw_only=True, slots=True)
class Kill:
    """How a life ends.

    With `countdown` > 0 at that crash point whose name begins with `point`, else after `seconds`.
    """

    countdown: int = 0
    point: str = ""
    seconds: float = 0.0
    after_opening: bool = False
    """Count seconds from the end of recovery, not from the fork."""
    resume: Literal["", "exact", "latest"] = ""
    """How this life opens the pool; empty: as the scenario does."""
    is_request: bool = False
    """After `seconds` ask with SIGTERM: the life closes its pool, wherever it is, and ends."""


@dataclass(frozen=True, slots=True)
class Reference:
    """The run that was left alone: digests by batch."""

    tables: dict[int, str]
    rest: dict[int, str]
    digest: str
    committed: int
    seconds: float
    points: dict[str, int]


@dataclass(slots=True)
class Tally:
    """What was seen so far."""

    runs: int = 0
    kills: int = 0
    requests: int = 0
    kills_in_creation: int = 0
    kills_in_recovery: int = 0
    kills_in_growth: int = 0
    """At places where the log, a table or the geometry of a pool that has a batch grows."""
    kills_in_cut: int = 0
    """At places where the ring of the journal gets its new base."""
    kills_judged: int = 0
    """Lives that found a committed batch."""
    open_transactions: int = 0
    """Of these: the flag of the next batch was set, its commit was not."""
    torn_transactions: int = 0
    """Of these: some of its rows had changed already."""
    rows_rolled_back: int = 0
    rows_changed: int = 0
    batches_redone: int = 0
    batches_found: set[int] = field(default_factory=set)
    recovery_ms: list[float] = field(default_factory=list)
    died_at: Counter[str] = field(default_factory=Counter)
    mismatches: list[str] = field(default_factory=list)

    @property
    def share_in_transaction(self) -> float:
        """Share of kills in the middle of a transaction, which recovery had to roll back."""
        return self.open_transactions / max(1, self.kills_judged)

    def summary(self) -> dict[str, Any]:
        """Plain numbers."""
        return {
            "runs": self.runs,
            "kills": self.kills,
            "requests": self.requests,
            "kills_in_creation": self.kills_in_creation,
            "kills_in_recovery": self.kills_in_recovery,
            "kills_in_growth": self.kills_in_growth,
            "kills_in_cut": self.kills_in_cut,
            "share_in_transaction": round(self.share_in_transaction, 3),
            "share_with_torn_rows": round(self.torn_transactions / max(1, self.kills_judged), 3),
            "rows_rolled_back": self.rows_rolled_back,
            "rows_changed": self.rows_changed,
            "batches_redone": self.batches_redone,
            "distinct_batches": len(self.batches_found),
            "mismatches": len(self.mismatches),
            "recovery_ms_p50": percentile(self.recovery_ms, 50),
            "recovery_ms_p99": percentile(self.recovery_ms, 99),
            "recovery_ms_max": percentile(self.recovery_ms, 100),
        }

    def count_kill(self, point: str, *, has_batch: bool) -> None:
        """Counts a kill at a named place, or at any time."""
        self.kills += 1
        self.died_at[point or "any time"] += 1
        self.kills_in_growth += has_batch and point in GROWTH_POINTS
        self.kills_in_cut += has_batch and point in _CUT_POINTS

    def count_recovery(self, report: dict[str, Any], *, was_in_transaction: bool = False) -> None:
        """Counts what a life found (the fields of RecoveryReport).

        `was_in_transaction`: seen in the files, where the recovery is from a journal, which does
        not look at the flags.
        """
        redone = report["committed_batch"] - report["resumed_batch"]
        is_open = was_in_transaction or report["batches_undone"] > redone
        self.kills_judged += 1
        self.batches_found.add(report["committed_batch"])
        self.open_transactions += is_open
        # Rows of committed batches that exact resume takes back have changed in any case.
        self.torn_transactions += is_open and redone == 0 and report["rows_changed"] > 0
        self.rows_rolled_back += report["rows_rolled_back"]
        self.rows_changed += report["rows_changed"]
        self.batches_redone += redone
        self.recovery_ms.append(report["milliseconds"])


def percentile(values: Iterable[float], percent: float) -> float:
    """Nearest-rank percentile; 0 of nothing."""
    ordered = sorted(values)
    if not ordered:
        return 0.0
    return round(ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))], 3)
