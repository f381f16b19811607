"""From a source's text form, `KIND:WHERE`, to a data set."""

from collections.abc import Callable, Mapping
from pathlib import Path

from trainingcxl.data.dataset import Dataset, SyntheticDataset
from trainingcxl.data.options import OpenOptions, Progress
from trainingcxl.data.synthetic_presets import parse_spec
from trainingcxl.errors import ConfigError

__all__ = ["open_data"]


def _open_synthetic(where: str, options: OpenOptions) -> Dataset:
    return SyntheticDataset(parse_spec(where))


def _open_criteo(where: str, options: OpenOptions) -> Dataset:
    from trainingcxl.data.criteo import open_criteo

    return open_criteo(where, options)


def _open_movielens(where: str, options: OpenOptions) -> Dataset:
    from trainingcxl.data.movielens import open_movielens

    return open_movielens(where, options)


def _open_npy(where: str, options: OpenOptions) -> Dataset:
    from trainingcxl.data.npy import open_npy

    return open_npy(where, options)


def _open_csv(where: str, options: OpenOptions) -> Dataset:
    from trainingcxl.data.csv_source import open_csv

    return open_csv(where, options)


def _open_parquet(where: str, options: OpenOptions) -> Dataset:
    from trainingcxl.data.parquet_source import open_parquet

    return open_parquet(where, options)


_HASHED = ("criteo", "npy", "csv", "parquet")
_TABLES = ("csv", "parquet")
_KINDS: dict[str, Callable[[str, OpenOptions], Dataset]] = {
    "synthetic": _open_synthetic,
    "criteo": _open_criteo,
    "movielens": _open_movielens,
    "npy": _open_npy,
    "csv": _open_csv,
    "parquet": _open_parquet,
}


def open_data(
    source: str,
    *,
    cache_dir: str | Path | None = None,
    hash_size: int | Mapping[str, int] | None = None,
    max_bad_lines: int = 0,
    require_labels: bool = True,
    schema: str | Path | None = None,
    progress: Progress | None = None,
) -> Dataset:
    """Open data of any kind.

    Args:
        source: `synthetic:NAME[?key=value&...]`, `criteo:FILE[,FILE...]`, `movielens:DIR`,
            `npy:DIR`, `csv:FILE[,FILE...]` or `parquet:FILE[,FILE...]`; `docs/data.md` describes
            each.
        cache_dir: Folder for the arrays that text is converted to, once.
        hash_size: Most rows of a table; larger ids are taken modulo this. One number for all
            features, or one by feature name; 0 or None chooses. Not for `synthetic:` (which has
            ?cap=ROWS) and `movielens:`.
        max_bad_lines: Lines that may be skipped because they can't be read; the next one stops.
        require_labels: Refuse data without labels (they would be nan).
        schema: TOML file that describes the columns of `csv:` and `parquet:`; None guesses.
        progress: Called with (what is being done, bytes done, bytes in all) during conversion.

    Returns:
        The data set; `report` tells what was skipped or chosen.

    Raises:
        ConfigError: The source is of no known kind, or an option is out of range.
        DataError: The data can't be read; names file, line and reason.

    Blocks until text is converted. Interrupting it leaves nothing half-done in the cache folder.
    """
    kind, colon, where = source.partition(":")
    if kind not in _KINDS or not colon or not where:
        known = ", ".join(f"{name}:..." for name in _KINDS)
        raise ConfigError(
            f"data source '{source}' is of no known kind\n  do:    use one of {known}"
        )
    if hash_size and kind not in _HASHED:
        way_out = (
            f"{source}{'&' if '?' in where else '?'}cap=ROWS"
            if kind == "synthetic"
            else "remove it"
        )
        raise ConfigError(f"{kind}: hash_size is of no use here\n  do:    {way_out}")
    if schema is not None and kind not in _TABLES:
        raise ConfigError(f"{kind}: a schema is of no use here\n  do:    remove it")
    if max_bad_lines < 0:
        raise ConfigError(f"max_bad_lines is {max_bad_lines}, must be >= 0")
    sizes = hash_size.values() if isinstance(hash_size, Mapping) else [hash_size or 0]
    if any(not 0 <= size < 1 << 62 for size in sizes):
        raise ConfigError(f"hash_size is {hash_size}, must be in [0, 2^62)")
    options = OpenOptions(
        cache_dir=None if cache_dir is None else Path(cache_dir),
        hash_size=hash_size or 0,
        max_bad_lines=max_bad_lines,
        require_labels=require_labels,
        schema=None if schema is None else Path(schema),
        progress=progress or (lambda what, done, total: None),
    )
    return _KINDS[kind](where, options)
