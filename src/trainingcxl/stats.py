"""Where the time and the bytes of a run went."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

__all__ = ["StepStats"]


_COUNTS = ("batches", "lookups", "rows", "rows_handed_over", "log_bytes", "dense_bytes")
_LOOKUPS = ("corrected_lookups", "late_lookups")
_TIMES = ("lookup", "update", "flag_wait", "commit", "dense_copy", "dense_wait", "early_wait")


@dataclass(frozen=True, kw_only=True, slots=True)
class StepStats:
    """Totals since the pool was opened; times in seconds."""

    batches: int
    lookups: int
    rows: int
    rows_handed_over: int
    log_bytes: int
    dense_bytes: int
    unannounced_batches: int
    fused_batches: int
    lookup_s: float
    update_s: float
    flag_wait_s: float
    commit_s: float
    dense_copy_s: float
    dense_wait_s: float
    early_wait_s: float
    """Relaxed lookup: what a commit had left to look up for the batch behind it."""
    corrected_lookups: int
    """Relaxed lookup: of rows that the batch before had changed."""
    late_lookups: int
    """Relaxed lookup: calls that were not announced in time, several times as slow."""
    background_s: float
    step_s: float

    @classmethod
    def from_core(cls, raw: Mapping[str, Any], step_seconds: float) -> Self:
        """From the native counters (nanoseconds) and the time that all steps took."""
        background = tuple(f"background_{work}_ns" for work in ("log", "sort", "dense", "early"))
        return cls(
            **{name: raw[name] for name in (*_COUNTS, *_LOOKUPS)},
            **{name + "_s": 1e-9 * raw[name + "_ns"] for name in _TIMES},
            unannounced_batches=raw["unannounced"],
            fused_batches=raw["fused"],
            background_s=1e-9 * sum(raw[name] for name in background),
            step_s=step_seconds,
        )
