"""Which level of durability is possible in a folder: the engine is asked, by making a pool."""

import contextlib
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from trainingcxl.errors import PoolError, TrainingCXLError
from trainingcxl.pool import Pool, TableSpec

__all__ = ["LEVELS", "Trial", "try_pool"]

LEVELS = ("power", "process")  # the highest first

_PREFIX = ".trainingcxl-doctor-"
_LEFT_OVER_AFTER_S = 3600
# 4 MiB of weights: whatever pages the kernel maps tables with, it shows.
_TABLE = TableSpec(
    name="probe",
    num_embeddings=1 << 16,
    embedding_dim=16,
    optimizer="sgd",
    init_scale=0.1,
    init_seed=0,
)


@dataclass(slots=True)
class Trial:
    """What the engine said of a folder.

    Attributes:
        level: The highest level it gives; None if no pool can be made.
        refused: Why not a higher one, by level.
        medium: devdax, fsdax, tmpfs, block; None if no pool can be made.
        file_system: Its name as the engine knows it.
        is_network: Whether it is a network file system.
        is_copy_on_write: Whether it never writes in place.
        page_bytes: Pages that tables are mapped with.
        flush: Instruction that pushes stores to the medium; "none" where none is needed.
    """

    level: str | None = None
    refused: dict[str, str] = field(default_factory=dict)
    medium: str | None = None
    file_system: str | None = None
    is_network: bool = False
    is_copy_on_write: bool = False
    page_bytes: int | None = None
    flush: str | None = None


def try_pool(folder: Path, shown: Path) -> Trial:
    """Make a pool of 8 MiB in a folder of its own and remove it; the highest level first.

    Args:
        folder: Where a pool would lie.
        shown: What the user called it; stands for our own folder in reasons.

    Returns:
        What was found. A folder in which nothing can be made is a finding, no error.
    """
    trial = Trial()
    _remove_left_overs(folder)
    try:
        with _own_folder(folder) as mine:
            for level in LEVELS:
                try:
                    _make(mine / "pool", level, trial)
                    break
                except (TrainingCXLError, OSError) as error:
                    trial.refused[level] = _reason(error, mine / "pool", shown)
    except OSError as error:
        trial.refused = dict.fromkeys(LEVELS, f"no folder can be made here: {error.strerror}")
    return trial


def _make(path: Path, level: str, trial: Trial) -> None:
    with Pool(path, durability=level, threads=1) as pool:
        pool.create_tables([_TABLE])
        facts = pool.core.facts()
    trial.level = level
    trial.medium, trial.file_system = facts["medium"], facts["file_system"]
    trial.is_network, trial.is_copy_on_write = facts["is_network"], facts["is_copy_on_write"]
    trial.page_bytes, trial.flush = facts["page_bytes"], facts["flush"]


def _reason(error: Exception, mine: Path, shown: Path) -> str:
    """Return what happened; of our own folder the user knows nothing."""
    return str(error).partition("\n")[0].replace(str(mine), str(shown))


@contextlib.contextmanager
def _own_folder(folder: Path) -> Iterator[Path]:
    mine = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=folder))
    try:
        yield mine
    finally:
        shutil.rmtree(mine, ignore_errors=True)


def _remove_left_overs(folder: Path) -> None:
    """Remove what a doctor that was killed could not."""
    for left in folder.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError, PoolError):
            if time.time() - left.stat().st_mtime > _LEFT_OVER_AFTER_S:
                Pool.discard(left / "pool")  # refuses while it is in use
                shutil.rmtree(left)
