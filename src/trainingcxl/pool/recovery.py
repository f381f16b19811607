"""What opening a pool found: the recovery report, and what relaxed lookups need of the batch
before.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from trainingcxl import _core

__all__ = ["RecoveryReport", "lookup_of", "recall_previous"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RecoveryReport:
    """What opening a pool found and did (architecture: section 4, "Recovery")."""

    committed_batch: int
    """Newest committed batch that was found."""
    dense_batch: int
    """Batch of the newest complete dense generation."""
    resumed_batch: int
    """The recovery point: training goes on with the batch after it."""
    batches_undone: int
    """Undo frames applied, newest first; a flagged batch that never committed counts."""
    rows_rolled_back: int
    """Undo records applied."""
    rows_changed: int
    """Of these, rows whose bytes differed from their record."""
    milliseconds: float
    resume: str
    is_rewind: bool = False
    """It completed a rewind (one that was killed, when the pool was opened)."""

    @classmethod
    def of(cls, found: Mapping[str, Any], seconds: float) -> Self:
        """From what the native core found."""
        names = (
            *("committed_batch", "dense_batch", "resumed_batch", "batches_undone"),
            *("rows_rolled_back", "rows_changed", "is_rewind"),
        )
        return cls(
            **{name: found[name] for name in names},
            milliseconds=1000 * seconds,
            resume="exact" if found["is_exact"] else "latest",
        )

    @property
    def batches_to_redo(self) -> int:
        """Committed batches that exact resume trains again, with the same bits."""
        return self.committed_batch - self.resumed_batch


def lookup_of(record: Mapping[str, Any] | None) -> str:
    """How the batch of a resume record was looked up: "strict" or "relaxed"."""
    return "strict" if record is None else str(record["volatile"].get("lookup", "strict"))


def recall_previous(core: "_core.Pool", record: Mapping[str, Any] | None) -> list[str]:
    """Finds what a relaxed lookup after the record's batch needs; a notice where it is gone."""
    if record is None or lookup_of(record) != "relaxed" or core.recall_previous():
        return []
    return [
        f"lookup is 'relaxed', and the undo log of batch {core.committed} is not there (this is a "
        "snapshot, or the batch lies far back): the next lookup is a strict one, whose last bits "
        "differ"
    ]
