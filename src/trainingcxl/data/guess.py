"""A schema for a table nobody has described: from names, types and the first rows of a file."""

import csv
import io
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainingcxl.data.options import HASH_SIZE
from trainingcxl.data.schema import CsvFormat, DenseColumn, LabelColumn, Schema, SparseColumn
from trainingcxl.data.text import read_blocks
from trainingcxl.errors import DataError

__all__ = ["guess_csv", "guess_parquet", "guess_schema", "is_parquet"]

_ROWS = 10_000
_BYTES = 4 << 20
_SEPARATORS = ",\t;|"
_MISSING = ("", "?", "NA", "N/A", "NULL", "null", "nan", "NaN", "None")
_LABEL_NAMES = ("label", "click", "clicked", "is_click", "target", "y", "class")
_SPARSE_ENDINGS = ("id", "_id", "code", "type", "category", "cat", "zip", "hour", "weekday")
_FEW_VALUES = 50
_FEW_ROWS = 10_000


@dataclass(frozen=True, slots=True)
class _Facts:
    """What the first rows say about a column.

    Attributes:
        name: Its name.
        kind: "int", "float" or "text".
        is_list: Whether rows hold lists.
        distinct: Different values seen, missing ones not counted.
        values: Values seen, missing ones not counted.
        least: Smallest number.
        largest: Largest number.
        split: Separator of several values in one text.
        texts: Some of the values.
    """

    name: str
    kind: str
    is_list: bool
    distinct: int
    values: int
    least: float
    largest: float
    split: str
    texts: list[str]


def _facts(name: str, cells: Sequence[Any], *, is_list: bool, split: str) -> _Facts:
    kind, least, largest = "int", math.inf, -math.inf
    for cell in cells:
        try:
            value: float = int(cell)
        except ValueError:
            try:
                value, kind = float(cell), "float" if kind != "text" else "text"
            except ValueError:
                kind = "text"
                break
        least, largest = min(least, value), max(largest, value)
    distinct = set(cells)
    return _Facts(
        name=name,
        kind=kind if cells else "text",
        is_list=is_list,
        distinct=len(distinct),
        values=len(cells),
        least=least,
        largest=largest,
        split=split,
        texts=sorted(str(value) for value in itertools.islice(distinct, 10)),
    )


def _is_category(facts: _Facts) -> bool:
    name = facts.name.lower()
    if facts.kind == "text" or facts.is_list:
        return True
    if facts.kind == "float":
        return False
    if name[:1] in ("c", "i") and name[1:].isdecimal():
        return name[0] == "c"
    is_named = name.endswith(_SPARSE_ENDINGS)
    return is_named or facts.distinct <= _FEW_VALUES or facts.largest >= 1 << 31


def _is_key(facts: _Facts) -> bool:
    """Whether every row has another value, so that nothing can be learned from the column."""
    is_number = facts.kind == "float" or (facts.kind == "int" and facts.largest < 1 << 31)
    return facts.values > 100 and facts.distinct == facts.values and not is_number


def _sparse(facts: _Facts) -> SparseColumn:
    if facts.kind == "int" and facts.least >= 0 and facts.largest < HASH_SIZE:
        return SparseColumn(column=facts.name, kind="modulo", split=facts.split)
    # Few values repeated often: rows enough that two of them seldom share one.
    is_closed = facts.distinct * 20 <= facts.values
    rows = min(max(_FEW_ROWS, 10 * facts.distinct), HASH_SIZE) if is_closed else HASH_SIZE
    return SparseColumn(column=facts.name, rows=rows, split=facts.split)


def _label(columns: Sequence[_Facts]) -> LabelColumn | None:
    pairs = [facts for facts in columns if facts.distinct == 2 and not facts.is_list]
    named = [facts for facts in pairs if facts.name.lower() in _LABEL_NAMES]
    is_binary = [facts for facts in pairs if facts.texts in (["0", "1"], ["0.0", "1.0"])]
    if not pairs:
        return None
    # By name, else 0 and 1, else the last column of two values: labels tend to come last.
    chosen = (named or is_binary or pairs[-1:])[0]
    if chosen in is_binary:
        return LabelColumn(column=chosen.name)
    return LabelColumn(column=chosen.name, positive=[chosen.texts[-1]])


def _schema(columns: Sequence[_Facts], form: CsvFormat, path: Path) -> Schema:
    label = _label(columns)
    rest = [facts for facts in columns if label is None or facts.name != label.column]
    rest = [facts for facts in rest if not _is_key(facts)]
    sparse = [_sparse(facts) for facts in rest if _is_category(facts)]
    if not sparse:
        raise DataError(
            f"{path}: no column looks like a category\n"
            "  do:    write a schema by hand (docs/data.md)"
        )
    return Schema(
        csv=form,
        label=label,
        dense=[
            DenseColumn(column=facts.name, log=facts.least >= 0)
            for facts in rest
            if not _is_category(facts)
        ],
        sparse=sparse,
    )


def _read_rows(path: Path) -> str:
    # Two blocks: a last line without newline follows in a block of its own.
    blocks = itertools.islice(read_blocks(path, block_bytes=_BYTES), 2)
    data = b"".join(block.data for block in blocks)
    if not data.strip():
        raise DataError(f"{path} holds no samples\n  do:    check that the file is complete")
    return data.decode("utf-8-sig", "surrogateescape")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def guess_csv(path: Path) -> Schema:
    """Guess the schema of a text table from its first 10,000 rows.

    Raises:
        DataError: The file can't be read, or no column looks like a category.
    """
    text = _read_rows(path)
    first = next((line for line in text.split("\n") if line.strip()), "")
    separator = max(_SEPARATORS, key=first.count)
    trim = f"{separator} " in first
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, skipinitialspace=trim)
    try:
        records = list(itertools.islice(reader, _ROWS + 1))
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num}: {error}") from error
    head, *records = [[cell.strip() for cell in record] for record in records if record]
    is_named = not any(_is_number(cell) or cell in _MISSING for cell in head)
    names = head if is_named else [f"column_{k + 1}" for k in range(len(head))]
    if not is_named:
        records.insert(0, head)
    columns, missing = [], {""}
    for k, name in enumerate(names):
        cells = [record[k] for record in records if len(record) == len(names)]
        missing |= {cell for cell in set(cells) if cell in _MISSING}
        kept = [cell for cell in cells if cell not in _MISSING]
        is_split = separator != "|" and sum("|" in cell for cell in kept) * 5 > len(kept)
        split = "|" if is_split else ""
        if split:
            kept = [value for cell in kept for value in cell.split(split)]
        columns.append(_facts(name, kept, is_list=bool(split), split=split))
    form = CsvFormat(separator=separator, header=is_named, trim=trim, missing=sorted(missing))
    return _schema(columns, form, path)


def guess_parquet(path: Path) -> Schema:
    """Guess the schema of a Parquet file from its types and first 10,000 rows.

    Raises:
        DataError: The file can't be read, or no column looks like a category.
    """
    from trainingcxl.data.parquet_source import import_polars, read_types

    polars, columns = import_polars(), []
    for name, kind in read_types(path).items():
        series = polars.scan_parquet(path).select(name).head(_ROWS).collect()[name]
        is_list = isinstance(kind, polars.List | polars.Array)
        if is_list:
            series = series.explode()
        if not (
            series.dtype.is_numeric()
            or series.dtype in (polars.String, polars.Boolean)
            or isinstance(series.dtype, polars.Categorical | polars.Enum)
        ):
            continue
        if series.dtype == polars.Boolean:
            series = series.cast(polars.Int8)
        cells = [str(cell) for cell in series.drop_nulls().to_list()]
        columns.append(_facts(name, cells, is_list=is_list, split=""))
    return _schema(columns, CsvFormat(), path)


def is_parquet(path: Path) -> bool:
    """Return whether a file is Parquet, by its first bytes.

    Raises:
        DataError: It can't be read.
    """
    try:
        with path.open("rb") as stream:
            return stream.read(4) == b"PAR1"
    except OSError as error:
        raise DataError(
            f"cannot read {path}: {error.strerror}\n  do:    check the path and its permissions"
        ) from error


def guess_schema(path: Path) -> Schema:
    """Guess the schema of a Parquet file or a text table.

    Raises:
        DataError: The file can't be read, or no column looks like a category.
    """
    return guess_parquet(path) if is_parquet(path) else guess_csv(path)
