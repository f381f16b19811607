"""Where the time and the bytes of a run went."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

__all__ = ["StepStats"]


_COUNTS = ("batches", "lookups", "rows", "rows_handed_over", "log_bytes", "dense_bytes")
_TIMES = ("lookup", "update", "flag_wait", "commit", "dense_copy", "dense_wait")


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
    background_s: float
    step_s: float

    @classmethod
    def from_core(cls, raw: Mapping[str, Any], step_seconds: float) -> Self:
        """From the native counters (nanoseconds) and the time that all steps took."""
        background = ("background_log_ns", "background_sort_ns", "background_dense_ns")
        return cls(
            **{name: raw[name] for name in _COUNTS},
            **{name + "_s": 1e-9 * raw[name + "_ns"] for name in _TIMES},
            unannounced_batches=raw["unannounced"],
            fused_batches=raw["fused"],
            background_s=1e-9 * sum(raw[name] for name in background),
            step_s=step_seconds,
        )
