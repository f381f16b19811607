"""Which earlier batches a pool can be taken back to, and choosing one of them."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trainingcxl.errors import RecoveryError

if TYPE_CHECKING:
    from trainingcxl import _core

__all__ = ["RewindPoint", "choose_point", "find_points"]

_SHOWN = 12  # batches named in an error


@dataclass(frozen=True, kw_only=True, slots=True)
class RewindPoint:
    """A batch before the present one that the undo log reaches."""

    batch: int
    batches_back: int
    is_exact: bool
    """Its dense part is kept: training goes on from it bit for bit. Else its tables alone could be
    put back; dense part and position would not be those of that batch: no rewind goes there.
    """
    epoch: int | None
    position: int | None
    """Batches consumed in the epoch; as the epoch known for exact points alone."""


def find_points(
    core: "_core.Pool", committed: int, *, needs_previous: bool = False
) -> list[RewindPoint]:
    """Every point within the horizon, newest first. Reads and checks all that the undo log
    keeps.

    Args:
        core: The pool.
        committed: Its present batch.
        needs_previous: Lookups are relaxed: the first one after a point needs the undo log of the
            point's own batch.
    """
    points = []
    for batch, resume in core.rewind_points():
        record = {} if resume is None else json.loads(resume)
        points.append(
            RewindPoint(
                batch=batch,
                batches_back=committed - batch,
                is_exact=resume is not None,
                epoch=record.get("epoch"),
                position=record.get("batch"),
            )
        )
    if needs_previous and points and points[-1].batch > 0:
        points.pop()
    return points


def choose_point(
    path: Path,
    points: Sequence[RewindPoint],
    committed: int,
    *,
    batches: int | None = None,
    to: int | None = None,
) -> int:
    """The batch to go back to.

    Args:
        path: The pool's, for errors.
        points: What is reachable, newest first.
        committed: The present batch.
        batches: Go back by at least so many, to the next exact point; or
        to: go to this batch.

    Raises:
        ValueError: Neither or both are given, or `batches` is not positive.
        RecoveryError: There is no such exact point; names those that there are.
    """
    if (batches is None) == (to is None):
        raise ValueError("give either a number of batches or the batch to go to")
    if batches is not None and batches < 1:
        raise ValueError(f"batches is {batches}, expected 1 or more")
    exact = [point.batch for point in points if point.is_exact]
    if batches is not None:
        fitting = [batch for batch in exact if batch <= committed - batches]
        wanted = f"no exact point at least {batches} batches before batch {committed}"
    else:
        fitting = [batch for batch in exact if batch == to]
        tables_only = any(point.batch == to for point in points)
        wanted = f"batch {to} is no exact point" + (
            ": its tables could be put back, its dense part is not kept" if tables_only else ""
        )
    if fitting:
        return fitting[0]
    names = ", ".join(map(str, exact[:_SHOWN])) + (", ..." if len(exact) > _SHOWN else "")
    raise RecoveryError(
        f"{wanted}\n  where: pool '{path}'\n  state: the pool is unchanged at batch {committed}\n"
        f"  do:    go back to one of the exact points: {names or 'there is none'} ('trainingcxl "
        f"rewind {path} --list'); keep_dense and log_bytes say how many there are"
    )
