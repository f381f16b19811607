"""What of a damaged pool can still be reached, and taking it there."""

import mmap
import os
from dataclasses import dataclass, field
from pathlib import Path

from trainingcxl import _core
from trainingcxl.errors import PoolCorrupted, PoolError, RecoveryError
from trainingcxl.pool.inspection import Damage, level_of, verify

__all__ = ["Examination", "RepairPoint", "examine", "repair"]

_HEAD_BYTES = 4 << 20  # docs/format.md: everything that names something else


@dataclass(frozen=True, kw_only=True, slots=True)
class RepairPoint:
    """A batch that the sound parts of a damaged pool reach."""

    batch: int
    dense_batch: int

    @property
    def is_exact(self) -> bool:
        """Rows, dense part and position are of one batch; else the rows are newer than the rest."""
        return self.batch == self.dense_batch


@dataclass(frozen=True, kw_only=True, slots=True)
class Examination:
    """What is wrong with a pool."""

    damage: list[Damage]
    refusal: str = ""
    """Why it cannot be opened; empty: it can."""
    committed_batch: int | None = None
    points: list[RepairPoint] = field(default_factory=list)
    """Newest first."""

    def choose(self, path: Path, to: int | None) -> RepairPoint | None:
        """The point to go to: the one asked for; else none, if the pool opens as it is; else the
        newest exact one, or the newest.

        Raises:
            RecoveryError: It is not reachable; or nothing is.
        """
        if to is None and not self.refusal:
            return None
        if not self.points:
            raise RecoveryError(
                f"nothing of pool '{path}' can be reached: what says where its rows stand is "
                "damaged\n  state: nothing was changed\n"
                f"  do:    restore it from a copy or a snapshot; 'trainingcxl verify {path}' lists "
                "all damage"
            )
        if to is None:
            return next((point for point in self.points if point.is_exact), self.points[0])
        fitting = [point for point in self.points if point.batch == to]
        if not fitting:
            names = ", ".join(str(point.batch) for point in self.points)
            raise RecoveryError(
                f"batch {to} of pool '{path}' cannot be reached\n"
                f"  state: nothing was changed\n  do:    go to one of {names}"
            )
        return fitting[0]


def examine(path: str | os.PathLike[str], *, device: str = "") -> Examination:
    """Looks for damage and for what can be reached all the same. Changes nothing.

    Args:
        path: The pool's folder.
        device: DAX device that holds it.

    Raises:
        PoolLocked: A trainer has it open.
        PoolError: There is no pool; or it is sound, so that there is nothing to repair.
    """
    damage = verify(path, device=device)
    try:
        core = _open(path, device, read_only=True)
    except PoolCorrupted as error:
        return Examination(damage=damage, refusal=str(error))
    refusal = ""
    try:
        points = [RepairPoint(batch=b, dense_batch=d) for b, d in core.repair_points()]
        slot = core.slot()
        try:
            core.recover(True)
        except PoolCorrupted as error:
            refusal = str(error)
    finally:
        core.close(False)
    if not damage and not refusal:
        raise PoolError(
            f"pool '{path}' is sound: there is nothing to repair\n"
            "  do:    train on; to go back to an earlier batch use 'trainingcxl rewind'"
        )
    return Examination(
        damage=damage,
        refusal=refusal,
        committed_batch=slot["batch"] if slot else None,
        points=points,
    )


def repair(path: str | os.PathLike[str], point: RepairPoint | None, *, device: str = "") -> Path:
    """Takes a damaged pool to a point that `examine` found; clears damaged dense parts.

    Args:
        path: The pool's folder.
        point: None: where any opening takes it.
        device: DAX device that holds it.

    Returns:
        Where the head of the log is kept as it was.

    Raises:
        PoolLocked: Somebody has it open.
        RecoveryError: The point cannot be reached any more.
    """
    core = _open(path, device, read_only=False)
    is_done = False
    try:
        kept = _keep_head(Path(path), device)
        if point is None:
            core.recover(True)
            core.clear_damaged()
        else:
            core.repair(point.batch)
        is_done = True
    finally:
        core.close(is_done)
    return kept


def _open(path: str | os.PathLike[str], device: str, *, read_only: bool) -> "_core.Pool":
    return _core.Pool(
        path=str(path), device=device, durability=level_of(path, device), read_only=read_only,
        unlocked=False, trust_after_reboot=read_only, force_medium="", assume_reboot=False,
        sparse=False,
    )  # fmt: skip


def _keep_head(pool: Path, device: str) -> Path:
    number = 1
    while (kept := pool / f"head.before-repair.{number}").exists():
        number += 1
    with (
        (Path(device) if device else pool / "log").open("rb") as log,
        mmap.mmap(log.fileno(), _HEAD_BYTES, prot=mmap.PROT_READ) as head,  # no device has read()
        kept.open("xb") as copy,
    ):
        copy.write(head[:])
        copy.flush()
        os.fsync(copy.fileno())
    return kept
