"""What `csv:` and `parquet:` share: columns of any table into dense values, ids and labels."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from trainingcxl.data import elementary
from trainingcxl.data.cache import (
    ArrayWriter,
    Source,
    convert_once,
    fingerprint_of,
    identify,
    load_arrays,
)
from trainingcxl.data.dataset import Dataset, Feature, range_error
from trainingcxl.data.elementary import Float64, UInt64
from trainingcxl.data.options import Limit, OpenOptions, limits_of, wrap_notes
from trainingcxl.data.schema import LabelColumn, Schema, SparseColumn
from trainingcxl.data.text import BadLines, Mask
from trainingcxl.errors import DataError

__all__ = ["Column", "Encoded", "TableReader", "open_table"]


@dataclass(frozen=True, slots=True)
class Encoded:
    """A column as unsigned integers, before they are fitted to a table.

    Attributes:
        values: A hash of each value, or the integer itself; shape (v,).
        missing: Which values are missing; shape (v,).
        good: Which values are what they should be; shape (v,).
        lengths: Values of each row, shape (rows,); None if each row has one.
    """

    values: UInt64
    missing: Mask
    good: Mask
    lengths: NDArray[np.int64] | None


class Column(Protocol):
    """One column of a chunk of rows."""

    def numbers(self) -> tuple[Float64, Mask]:
        """Return the values, nan for missing ones, and which are good."""

    def missing(self) -> Mask:
        """Return which values are missing."""

    def among(self, texts: Sequence[str]) -> Mask:
        """Return which values are one of the texts."""

    def encode(self, kind: str, split: str) -> Encoded:
        """Return the values as unsigned integers: "hash" hashes, other kinds take integers."""

    def reject(self, wrong: Mask, reason: str) -> None:
        """Mark rows as bad; {} in `reason` becomes the value."""


class Chunk(Protocol):
    """Some rows of a table."""

    num_rows: int
    done_bytes: int
    total_bytes: int
    unit: str

    def column(self, name: str) -> Column:
        """Return a column by name."""

    def bad(self) -> dict[int, str]:
        """Return why rows are bad, by line or row number."""

    def good(self) -> Mask:
        """Return which rows are good."""


class TableReader(Protocol):
    """Reads one kind of file."""

    kind: str

    def names(self, path: Path, schema: Schema) -> list[str]:
        """Return the names of the columns of a file."""

    def check(self, path: Path, schema: Schema) -> tuple[list[bool], bool]:
        """Check the columns.

        Returns:
            Which sparse columns hold lists, and whether the label is there.
        """

    def chunks(self, path: Path, schema: Schema) -> Any:
        """Yield `Chunk`s."""


def _labels(chunk: Chunk, label: LabelColumn | None) -> NDArray[np.float32]:
    if label is None:
        return np.full(chunk.num_rows, np.nan, dtype=np.float32)
    column = chunk.column(label.column)
    if label.positive is not None:
        column.reject(column.missing(), f"label {label.column} is missing")
        return column.among(label.positive).astype(np.float32)
    values, good = column.numbers()
    if label.threshold is not None:
        good = good & ~np.isnan(values)
        column.reject(~good, f"label {label.column} is {{}}, expected a number")
        return (values >= label.threshold).astype(np.float32)
    good = good & np.isin(values, (0.0, 1.0))
    column.reject(~good, f"label {label.column} is {{}}, expected 0 or 1")
    return values.astype(np.float32)


def _dense(chunk: Chunk, schema: Schema) -> NDArray[np.float32]:
    dense = np.empty((chunk.num_rows, len(schema.dense)), dtype=np.float32)
    for k, wanted in enumerate(schema.dense):
        column = chunk.column(wanted.column)
        values, good = column.numbers()
        column.reject(~good, f"{wanted.column} is {{}}, expected a number or nothing")
        values = np.where(good & ~np.isnan(values), values, 0.0)
        if wanted.log:
            values = elementary.log(1.0 + np.maximum(values, 0.0))
        dense[:, k] = values
    return dense


def _ids(chunk: Chunk, wanted: SparseColumn, rows: int) -> Encoded:
    """Return ids, before the modulo for kinds "modulo" and "id"."""
    column = chunk.column(wanted.column)
    encoded = column.encode(wanted.kind, wanted.split)
    good = encoded.good | encoded.missing
    if wanted.kind == "id" and wanted.missing is None:
        good = good & ~encoded.missing
    if not good.all():
        expected = "a value" if wanted.kind == "hash" else "an integer in [0, 2^64)"
        wrong = ~good
        if encoded.lengths is not None:
            row = np.repeat(np.arange(chunk.num_rows), encoded.lengths)
            wrong = np.bincount(row[wrong], minlength=chunk.num_rows) > 0
        column.reject(wrong, f"{wanted.column} is {{}}, expected {expected}")
    if wanted.kind == "hash":
        values = encoded.values % np.uint64(max(rows - 1, 1)) + np.uint64(min(rows - 1, 1))
    else:
        values = encoded.values
    values = np.where(encoded.missing, np.uint64(wanted.missing or 0), values)
    return Encoded(values, encoded.missing, good, encoded.lengths)


class _Conversion:
    """One run over all files."""

    def __init__(
        self, reader: TableReader, schema: Schema, limits: dict[str, Limit], options: OpenOptions
    ) -> None:
        self.reader, self.schema, self.limits, self.options = reader, schema, limits, options

    def run(self, folder: Path, sources: Sequence[Source]) -> None:
        schema, limits = self.schema, self.limits
        is_list, _ = self.reader.check(sources[0].path, schema)
        features = [
            Feature(c.column, limits[c.column].rows if limits[c.column].is_exact else 0, jagged)
            for c, jagged in zip(schema.sparse, is_list, strict=True)
        ]
        names = [column.column for column in schema.dense]
        writer = ArrayWriter(folder, names, features, [limit.rows for limit in limits.values()])
        bad = BadLines(self.options.max_bad_lines)
        try:
            for source in sources:
                if self.reader.check(source.path, schema)[0] != is_list:
                    raise DataError(f"{source.path} and {sources[0].path} differ in list columns")
                for chunk in self.reader.chunks(source.path, schema):
                    self._append(writer, chunk, bad, source)
            if writer.num_samples == 0:
                raise DataError(f"{sources[0].path} holds no samples")
            self._check_ids(writer.largest)
            wraps = {c.column: limits[c.column] for c in schema.sparse if c.kind != "hash"}
            notes = wrap_notes(writer.largest, wraps)
            has_labels = schema.label is not None
            writer.finish({"has_labels": has_labels, "bad_lines": bad.found, "notes": notes})
        finally:
            writer.close()

    def _append(self, writer: ArrayWriter, chunk: Chunk, bad: BadLines, source: Source) -> None:
        label, dense = _labels(chunk, self.schema.label), _dense(chunk, self.schema)
        encoded = [_ids(chunk, c, self.limits[c.column].rows) for c in self.schema.sparse]
        bad.report(source.path, chunk.bad(), unit=chunk.unit)
        good = chunk.good()
        ids: list[UInt64] = []
        lengths: list[NDArray[np.int64] | None] = []
        for column in encoded:
            if column.lengths is None:
                ids.append(column.values[good])
                lengths.append(None)
            else:
                ids.append(column.values[np.repeat(good, column.lengths)])
                lengths.append(column.lengths[good])
        writer.append(dense[good], ids, lengths, label[good])
        what = f"converting {source.path.name}"
        self.options.progress(what, chunk.done_bytes, chunk.total_bytes)
        source.check_unchanged()

    def _check_ids(self, largest: dict[str, int]) -> None:
        """Refuse ids beyond the rows that the schema gives to a column of kind "id"."""
        for column in self.schema.sparse:
            is_fixed = column.kind == "id" and column.rows and not _overridden(column, self.options)
            found = largest[column.column] + 1
            if is_fixed and found > column.rows:
                raise range_error(column.column, found, column.rows)


def _overridden(column: SparseColumn, options: OpenOptions) -> bool:
    size = options.hash_size
    return bool(size if isinstance(size, int) else size.get(column.column))


def _limits(schema: Schema, options: OpenOptions) -> dict[str, Limit]:
    """Return the limit of each feature: the user's, else the schema's rows, else a choice."""
    names = [column.column for column in schema.sparse]
    limits = limits_of(names, options.hash_size)
    for column in schema.sparse:
        name = column.column
        if column.rows and not _overridden(column, options):
            limits[name] = Limit(column.rows, True)
        elif column.kind == "hash":
            limits[name] = Limit(limits[name].rows, True)
    return limits


def open_table(
    reader: TableReader, paths: Sequence[Path], schema: Schema, options: OpenOptions
) -> Dataset:
    """Open files of one table, converting them on first use."""
    cache_dir = options.need_cache_dir(reader.kind)
    sources = [identify(path) for path in paths]
    if options.require_labels and schema.label is None:
        raise DataError(
            f'{paths[0]}: the schema has no [label]\n  do:    add it, with column = "NAME"'
        )
    limits = _limits(schema, options)
    sizes = {name: [limit.rows, limit.is_exact] for name, limit in limits.items()}
    # Data to be scored may lack the label of the data that was trained on; all else is read alike.
    identity = {"source": reader.kind, "schema": schema.as_dict(), "hash_size": sizes}
    label = schema.label
    if label and not options.require_labels and label.column not in reader.names(paths[0], schema):
        schema = replace(schema, label=None)
    for path in paths:
        reader.check(path, schema)
    conversion = _Conversion(reader, schema, limits, options)
    folder = convert_once(
        cache_dir,
        sources,
        identity,
        lambda into: conversion.run(into, sources),
        options.waiting,
    )
    return options.checked(load_arrays(folder, fingerprint_of(sources, identity), []))


def check_columns(path: Path, names: Sequence[str], schema: Schema) -> None:
    """Check that every column of the schema is there.

    Raises:
        DataError: One is not; names those that are.
    """
    missing = [name for name in schema.columns() if name not in names]
    if missing:
        shown = ", ".join(names[:50])
        raise DataError(
            f"{path} has no column '{missing[0]}'\n  do:    correct the schema; there are {shown}"
        )
