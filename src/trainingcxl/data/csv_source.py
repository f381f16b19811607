"""`csv:FILE[,FILE...]`: text tables, with or without header and quotes, plain or gzip."""

import codecs
import csv
import io
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from trainingcxl.data.dataset import Dataset
from trainingcxl.data.elementary import Float64
from trainingcxl.data.guess import guess_csv
from trainingcxl.data.options import OpenOptions, paths_of
from trainingcxl.data.schema import CsvFormat, Schema, load_schema
from trainingcxl.data.tabular import Encoded, check_columns, open_table
from trainingcxl.data.text import (
    Block,
    FieldTable,
    Mask,
    Positions,
    hash_text,
    parse_decimal,
    parse_numbers,
    read_blocks,
    split_block,
    split_quoted,
    table_of_records,
    trim,
)
from trainingcxl.errors import DataError

__all__ = ["CsvReader", "column_names", "open_csv"]

_RECORDS = 16384
_MINUS = ord("-")


class _TextColumn:
    """One column of a `FieldTable`."""

    def __init__(self, table: FieldTable, column: int, missing: Sequence[str]) -> None:
        self._table, self._column, self._missing = table, column, missing
        self._start, self._end = table.start[:, column], table.end[:, column]

    def among(self, texts: Sequence[str]) -> Mask:
        return self._equal(self._start, self._end, texts)

    def _equal(self, start: Positions, end: Positions, texts: Sequence[str]) -> Mask:
        found = np.zeros(start.shape, dtype=np.bool_)
        for text in texts:
            wanted = text.encode()
            same = end - start == len(wanted)
            for k, byte in enumerate(wanted):
                same[same] = self._table.data[start[same] + k] == byte
            found |= same
        return found

    def missing(self) -> Mask:
        return self.among(self._missing)

    def numbers(self) -> tuple[Float64, Mask]:
        is_missing = self.missing()
        end = np.where(is_missing, self._start, self._end)
        values, good = parse_numbers(self._table.data, self._start, end)
        return values, good & (is_missing | (end > self._start))

    def encode(self, kind: str, split: str) -> Encoded:
        start, end, lengths = self._start, self._end, None
        if split:
            start, end, lengths = self._split(split)
        is_missing = self._equal(start, end, self._missing)
        data = self._table.data
        if kind == "hash":
            return Encoded(hash_text(data, start, end), is_missing, end >= start, lengths)
        is_negative = (end - start > 1) & (data[np.minimum(start, data.size - 1)] == _MINUS)
        values, good = parse_decimal(data, start + is_negative, end)
        good &= end > start
        # Negative numbers are their two's complement; as ids they are refused.
        values = np.where(is_negative, np.uint64(0) - values, values)
        return Encoded(values, is_missing, good & ((kind == "modulo") | ~is_negative), lengths)

    def _split(self, split: str) -> tuple[Positions, Positions, Positions]:
        """Return start and end of each value, and how many a row has; an empty field has none."""
        kept = np.flatnonzero(~self.missing() & (self._end > self._start))
        start, end = self._start[kept], self._end[kept]
        # Fields follow each other in the block, so all that is found stays in order when sorted.
        cuts = np.flatnonzero(self._table.data == ord(split))
        row = np.searchsorted(start, cuts, side="right") - 1
        is_inside = (row >= 0) & (cuts < end[row]) if kept.size else np.zeros(cuts.size, np.bool_)
        cuts, row = cuts[is_inside], row[is_inside]
        counts = np.zeros(self._start.size, dtype=np.int64)
        counts[kept] = 1 + np.bincount(row, minlength=kept.size)
        return np.sort(np.append(start, cuts + 1)), np.sort(np.append(cuts, end)), counts

    def reject(self, wrong: Mask, reason: str) -> None:
        self._table.reject(wrong, self._column, reason)


class _TextChunk:
    """Rows of a `FieldTable` as a `Chunk`."""

    unit = "line"

    def __init__(
        self, table: FieldTable, names: Sequence[str], form: CsvFormat, done: int, total: int
    ) -> None:
        if form.trim:
            trim(table)
        self._table, self._names, self._missing = table, names, form.missing
        self.num_rows, self.done_bytes, self.total_bytes = table.line.size, done, total

    def column(self, name: str) -> _TextColumn:
        return _TextColumn(self._table, self._names.index(name), self._missing)

    def bad(self) -> dict[int, str]:
        return self._table.bad

    def good(self) -> Mask:
        return self._table.good()


def _first_record(path: Path, form: CsvFormat) -> list[str]:
    """Return the fields of the first line that is not blank."""
    for block in read_blocks(path, block_bytes=1 << 16):
        text = block.data.decode("utf-8-sig", "surrogateescape")
        for line in text.split("\n"):
            if line.strip():
                return next(csv.reader([line.rstrip("\r")], delimiter=form.separator))
    raise DataError(f"{path} holds no samples\n  do:    check that the file is complete")


def column_names(path: Path, form: CsvFormat) -> list[str]:
    """Return the names of the columns.

    Raises:
        DataError: The file is empty, or two columns have the same name.
    """
    fields = _first_record(path, form)
    if not form.header:
        return [f"column_{k + 1}" for k in range(len(fields))]
    names = [name.strip() if form.trim else name for name in fields]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise DataError(f"{path}, line 1: column named twice: '{twice[0]}'")
    return names


class CsvReader:
    """Reads text tables; see `TableReader`."""

    kind = "csv"

    def names(self, path: Path, schema: Schema) -> list[str]:
        """Name the columns; see `TableReader`."""
        return column_names(path, schema.csv)

    def check(self, path: Path, schema: Schema) -> tuple[list[bool], bool]:
        """Check the columns; see `TableReader`."""
        check_columns(path, column_names(path, schema.csv), schema)
        return [bool(column.split) for column in schema.sparse], schema.label is not None

    def chunks(self, path: Path, schema: Schema) -> Iterator[_TextChunk]:
        """Yield the rows of one file."""
        form, names = schema.csv, column_names(path, schema.csv)
        blocks = _rows(read_blocks(path), has_header=form.header)
        for block in blocks:
            if b'"' in block.data:
                # Quotes may hide separators and line ends, here and across blocks.
                yield from self._quoted(itertools.chain([block], blocks), names, form, path)
                return
            if block.data:
                table = split_block(block, form.separator.encode(), len(names))
                yield _TextChunk(table, names, form, block.done_bytes, block.total_bytes)

    def _quoted(
        self, blocks: Iterator[Block], names: list[str], form: CsvFormat, path: Path
    ) -> Iterator[_TextChunk]:
        place = [0, 0]
        first, blocks = _peek(blocks)

        def lines() -> Iterator[str]:
            for block in blocks:
                place[:] = [block.done_bytes, block.total_bytes]
                text = block.data.decode("utf-8", "surrogateescape")
                # Not splitlines: that also splits at form feeds and other rare characters.
                yield from io.StringIO(text, newline="\n")

        records = split_quoted(lines(), first.first_line, path, form.separator)
        while batch := list(itertools.islice(records, _RECORDS)):
            yield _TextChunk(table_of_records(batch, len(names)), names, form, place[0], place[1])


def _peek(blocks: Iterator[Block]) -> tuple[Block, Iterator[Block]]:
    first = next(blocks)
    return first, itertools.chain([first], blocks)


def _rows(blocks: Iterator[Block], *, has_header: bool) -> Iterator[Block]:
    """Drop a byte order mark, and the header: the first line that is not blank."""
    is_dropped = not has_header
    for block in blocks:
        data, line = block.data, block.first_line
        if line == 1:
            data = data.removeprefix(codecs.BOM_UTF8)
        while not is_dropped and data:
            head, _, data = data.partition(b"\n")
            is_dropped, line = bool(head.strip()), line + 1
        yield Block(data, line, block.done_bytes, block.total_bytes)


def open_csv(where: str, options: OpenOptions) -> Dataset:
    """Open text tables; see `open_data`."""
    paths = paths_of(where)
    schema = guess_csv(paths[0]) if options.schema is None else load_schema(options.schema)
    return open_table(CsvReader(), paths, schema, options)
