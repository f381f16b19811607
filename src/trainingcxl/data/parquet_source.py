"""`parquet:FILE[,FILE...]`, read with polars (the extra `data`)."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from trainingcxl.data.dataset import Dataset
from trainingcxl.data.elementary import Float64, mix
from trainingcxl.data.guess import guess_parquet
from trainingcxl.data.options import OpenOptions, paths_of
from trainingcxl.data.schema import Schema, load_schema
from trainingcxl.data.tabular import Encoded, check_columns, open_table
from trainingcxl.data.text import Mask, hash_text
from trainingcxl.errors import DataError

if TYPE_CHECKING:
    import polars as pl

__all__ = ["ParquetReader", "import_polars", "open_parquet"]

_CHUNK_ROWS = 1 << 17


def import_polars() -> ModuleType:
    """Return polars.

    Raises:
        DataError: It isn't installed.
    """
    try:
        import polars
    except ImportError as error:
        raise DataError(
            "Parquet is read and written with polars, which is not installed\n"
            "  do:    pip install 'trainingcxl[data]'"
        ) from error
    return polars


class _SeriesColumn:
    """One column of a chunk."""

    def __init__(self, series: "pl.Series", chunk: "_SeriesChunk") -> None:
        self._series, self._chunk = series, chunk

    def numbers(self) -> tuple[Float64, Mask]:
        polars = import_polars()
        if not (self._series.dtype.is_numeric() or self._series.dtype == polars.Boolean):
            raise self._chunk.wrong_type(self._series, "numbers")
        # nan stands for null from here on, so a nan in the file counts as missing too.
        values = self._series.cast(polars.Float64).to_numpy().astype(np.float64)
        return values, ~np.isinf(values)

    def missing(self) -> Mask:
        return self._series.is_null().to_numpy().astype(np.bool_)

    def among(self, texts: Sequence[str]) -> Mask:
        polars = import_polars()
        found = self._series.cast(polars.String).is_in(list(texts)).fill_null(False)
        return found.to_numpy().astype(np.bool_)

    def encode(self, kind: str, split: str) -> Encoded:
        polars = import_polars()
        series, lengths = self._series, None
        if split:
            if series.dtype != polars.String:
                raise self._chunk.wrong_type(series, "texts to split")
            series = series.str.split(split)
        if isinstance(series.dtype, polars.List | polars.Array):
            series = series.cast(polars.List(series.dtype.inner))
            counts = series.list.len().fill_null(0)
            lengths = counts.to_numpy().astype(np.int64)
            series = series.filter(counts > 0).explode()
        missing = series.is_null().to_numpy().astype(np.bool_)
        if series.dtype == polars.Boolean:
            series = series.cast(polars.UInt8)
        if isinstance(series.dtype, polars.Categorical | polars.Enum):
            series = series.cast(polars.String)
        if series.dtype.is_integer():
            values, good = _integers(series, kind)
            return Encoded(mix(values) if kind == "hash" else values, missing, good, lengths)
        if series.dtype == polars.String and kind == "hash":
            return Encoded(_hash_series(series), missing, ~missing, lengths)
        raise self._chunk.wrong_type(series, "texts or integers" if kind == "hash" else "integers")

    def reject(self, wrong: Mask, reason: str) -> None:
        for row in np.flatnonzero(wrong).tolist():
            text = repr(self._series[row])[:43]
            self._chunk.reasons.setdefault(self._chunk.first_row + row, reason.format(text))


def _integers(series: "pl.Series", kind: str) -> tuple[NDArray[np.uint64], Mask]:
    polars = import_polars()
    if series.dtype == polars.UInt64:
        values = series.fill_null(0).to_numpy().astype(np.uint64)
        return values, np.ones(values.shape, dtype=np.bool_)
    signed = series.fill_null(0).cast(polars.Int64).to_numpy().astype(np.int64)
    return signed.view(np.uint64), (signed >= 0) | (kind != "id")


def _hash_series(series: "pl.Series") -> NDArray[np.uint64]:
    """Hash distinct texts once; the same hash as for text files."""
    polars = import_polars()
    coded = series.fill_null("")
    distinct = coded.unique()
    cells = [text.encode() for text in distinct.to_list()]
    end = np.cumsum([len(cell) for cell in cells], dtype=np.int64)
    start = end - np.array([len(cell) for cell in cells], dtype=np.int64)
    hashes = hash_text(np.frombuffer(b"".join(cells) + b"\n", dtype=np.uint8), start, end)
    table = polars.Series(values=hashes, dtype=polars.UInt64)
    return coded.replace_strict(distinct, table).to_numpy().astype(np.uint64)


class _SeriesChunk:
    """Rows of a data frame as a `Chunk`; rows are numbered from 1."""

    unit = "row"

    def __init__(self, frame: "pl.DataFrame", path: Path, first_row: int, total_rows: int) -> None:
        self._frame, self._path, self.first_row = frame, path, first_row
        self.num_rows, self.reasons = frame.height, dict[int, str]()
        size = path.stat().st_size
        self.total_bytes = size
        self.done_bytes = size * (first_row - 1 + frame.height) // max(total_rows, 1)

    def column(self, name: str) -> _SeriesColumn:
        return _SeriesColumn(self._frame[name], self)

    def bad(self) -> dict[int, str]:
        return self.reasons

    def good(self) -> Mask:
        good = np.ones(self.num_rows, dtype=np.bool_)
        good[[row - self.first_row for row in self.reasons]] = False
        return good

    def wrong_type(self, series: "pl.Series", expected: str) -> DataError:
        return DataError(
            f"{self._path}: column '{series.name}' has type {series.dtype}, expected {expected}\n"
            "  do:    correct the schema, or leave the column out"
        )


class ParquetReader:
    """Reads Parquet; see `TableReader`."""

    kind = "parquet"

    def names(self, path: Path, schema: Schema) -> list[str]:
        """Name the columns; see `TableReader`."""
        return list(read_types(path))

    def check(self, path: Path, schema: Schema) -> tuple[list[bool], bool]:
        """Check the columns; see `TableReader`."""
        polars, types = import_polars(), read_types(path)
        check_columns(path, list(types), schema)
        lists = [isinstance(types[c.column], polars.List | polars.Array) for c in schema.sparse]
        is_list = [found or bool(c.split) for found, c in zip(lists, schema.sparse, strict=True)]
        return is_list, schema.label is not None

    def chunks(self, path: Path, schema: Schema) -> Iterator[_SeriesChunk]:
        """Yield the rows of one file."""
        polars = import_polars()
        columns = list(dict.fromkeys(schema.columns()))
        try:
            frames = polars.scan_parquet(path).select(columns)
            total = polars.scan_parquet(path).select(polars.len()).collect().item()
            for start in range(0, total, _CHUNK_ROWS):
                frame = frames.slice(start, _CHUNK_ROWS).collect()
                yield _SeriesChunk(frame, path, start + 1, total)
        except (OSError, polars.exceptions.PolarsError) as error:
            raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> DataError:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return DataError(f"cannot read {path}: {reason}\n  do:    it must be a Parquet file")


def read_types(path: Path) -> dict[str, Any]:
    """Return the type of each column, as polars names it.

    Raises:
        DataError: The file can't be read.
    """
    polars = import_polars()
    try:
        return dict(polars.scan_parquet(path).collect_schema())
    except (OSError, polars.exceptions.PolarsError) as error:
        raise _unreadable(path, error) from error


def open_parquet(where: str, options: OpenOptions) -> Dataset:
    """Open Parquet files; see `open_data`."""
    paths = paths_of(where)
    schema = guess_parquet(paths[0]) if options.schema is None else load_schema(options.schema)
    return open_table(ParquetReader(), paths, schema, options)
