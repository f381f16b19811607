"""What `open_data` passes to the reader of each kind of source, and rules that readers share."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from trainingcxl.data.dataset import Dataset
from trainingcxl.data.text import BadLines
from trainingcxl.errors import ConfigError, DataError

__all__ = ["HASH_SIZE", "Limit", "OpenOptions", "Progress", "limits_of", "paths_of", "wrap_notes"]

Progress: TypeAlias = Callable[[str, int, int], None]

HASH_SIZE = 100_000  # rows of a table at most, unless the user says otherwise


def _no_progress(what: str, done: int, total: int) -> None:
    """Report nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenOptions:
    """How to open a source; see `open_data`."""

    cache_dir: Path | None = None
    hash_size: int | Mapping[str, int] = 0
    max_bad_lines: int = 0
    require_labels: bool = True
    schema: Path | None = None
    progress: Progress = field(default=_no_progress)

    def need_cache_dir(self, kind: str) -> Path:
        """Return the cache folder.

        Raises:
            ConfigError: None was given.
        """
        if self.cache_dir is None:
            raise ConfigError(
                f"{kind}: text is converted to arrays once, and no folder for them was named\n"
                "  do:    pass cache_dir (in the command: --set cache.dir=FOLDER)"
            )
        return self.cache_dir

    def waiting(self) -> None:
        """Tell that another process is converting."""
        self.progress("waiting for another process that converts data", 0, 0)

    def checked(self, data: Dataset) -> Dataset:
        """Return `data` if it has no more bad lines than allowed now.

        Raises:
            DataError: It was converted when more bad lines were allowed.
        """
        found = data.report.bad_lines
        if len(found) > self.max_bad_lines:
            bad = BadLines(self.max_bad_lines, found[: self.max_bad_lines])
            raise bad.error(found[self.max_bad_lines])
        return data


@dataclass(frozen=True, slots=True)
class Limit:
    """Most rows of a feature's table; `is_exact` if the user named the feature: no fewer either."""

    rows: int
    is_exact: bool


def limits_of(names: Iterable[str], hash_size: int | Mapping[str, int]) -> dict[str, Limit]:
    """Return the limit of each feature.

    Raises:
        ConfigError: A size is given for a feature that doesn't exist.
    """
    names = list(names)
    if not isinstance(hash_size, Mapping):
        return {name: Limit(hash_size or HASH_SIZE, False) for name in names}
    for name in hash_size:
        if name not in names:
            known = ", ".join(names)
            raise ConfigError(
                f"hash_size: the data has no feature '{name}'\n  do:    it has {known}"
            )
    return {
        name: Limit(hash_size.get(name) or HASH_SIZE, bool(hash_size.get(name))) for name in names
    }


def wrap_notes(largest: Mapping[str, int], limits: Mapping[str, Limit]) -> list[str]:
    """Return a note about features whose ids did not fit their limit."""
    wrapped = [
        f"{name} (up to {largest[name]}, {limit.rows} rows)"
        for name, limit in limits.items()
        if largest[name] >= limit.rows
    ]
    if not wrapped:
        return []
    return [
        f"ids taken modulo the rows of their table: {', '.join(wrapped)}; "
        "more rows with --set data.hash_size=ROWS"
    ]


def paths_of(where: str) -> list[Path]:
    """Split `FILE[,FILE...]`.

    Raises:
        DataError: A name is empty or is a folder.
    """
    paths = [Path(name).expanduser() for name in where.split(",")]
    for name, path in zip(where.split(","), paths, strict=True):
        if not name:
            raise DataError(f"'{where}' names an empty file name between commas")
        if path.is_dir():
            raise DataError(f"cannot read {path}: it is a folder\n  do:    name the files in it")
    return paths
