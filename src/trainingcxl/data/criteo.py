"""Criteo click logs: the official text (Kaggle and 1TB) and the ranked variant with a header.

Official: no header, 40 TAB columns (label, 13 integers, 26 hexadecimal strings), 39 in test files.
Ranked: a header line, the same columns, categories as decimal numbers. The first line decides.
Dense values become log1p(max(value, 0)), missing ones 0, as in DLRM; a missing category is id 0.
"""

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trainingcxl.data import elementary
from trainingcxl.data.cache import (
    ArrayWriter,
    Source,
    convert_once,
    fingerprint_of,
    identify,
    load_arrays,
)
from trainingcxl.data.dataset import Dataset, Feature
from trainingcxl.data.options import Limit, OpenOptions, limits_of, paths_of, wrap_notes
from trainingcxl.data.text import (
    BadLines,
    Block,
    FieldTable,
    parse_decimal,
    parse_hex,
    parse_numbers,
    read_blocks,
    split_block,
)
from trainingcxl.errors import DataError

__all__ = ["open_criteo"]

DENSE_NAMES = tuple(f"I{k}" for k in range(1, 14))
FEATURE_NAMES = tuple(f"C{j}" for j in range(1, 27))
_COLUMNS = 1 + len(DENSE_NAMES) + len(FEATURE_NAMES)


@dataclass(frozen=True, slots=True)
class _Layout:
    """How one file is written."""

    has_header: bool
    has_labels: bool

    @property
    def columns(self) -> int:
        return _COLUMNS if self.has_labels else _COLUMNS - 1


def _layout(path: Path, max_bad_lines: int) -> _Layout:
    """Look at the first line, or at the first ones if bad lines are allowed."""
    # Two blocks: an only line that has no newline follows in a block of its own.
    blocks = itertools.islice(read_blocks(path, block_bytes=1 << 16), 2)
    # Not splitlines: a carriage return within a line does not end it.
    lines = [line.rstrip(b"\r") for block in blocks for line in block.data.split(b"\n")]
    lines = [line for line in lines if line][: max_bad_lines + 1]
    if not lines:
        raise DataError(f"{path} holds no samples\n  do:    check that the file is complete")
    for line in lines:
        fields = line.split(b"\t")
        has_header = fields[0].strip().lower() in (b"label", b"i1", b"int_0")
        if has_header:
            _check_header(path, fields)
        if len(fields) in (_COLUMNS, _COLUMNS - 1):
            return _Layout(has_header, len(fields) == _COLUMNS)
    columns = lines[0].count(b"\t") + 1
    raise DataError(
        f"{path}, line 1: {columns} TAB-separated columns, expected {_COLUMNS} "
        f"(label, 13 integers, 26 categories), or {_COLUMNS - 1} without labels\n"
        "  do:    for another format use csv:FILE; 'trainingcxl schema FILE' guesses its columns"
    )


def _check_header(path: Path, fields: list[bytes]) -> None:
    names = [name.strip().decode("utf-8", "replace") for name in fields]
    first = 1 if names[0].lower() == "label" else 0
    variants = [
        [*DENSE_NAMES, *FEATURE_NAMES],
        [*(f"int_{k}" for k in range(13)), *(f"cat_{j}" for j in range(26))],
    ]
    if names[first:] not in variants:
        raise DataError(
            f"{path}, line 1: the header is not label, I1 .. I13, C1 .. C26 in this order\n"
            "  do:    use csv:FILE; 'trainingcxl schema FILE' guesses its columns"
        )


def _parse(table: FieldTable, layout: _Layout) -> tuple[Any, ...]:
    """Return dense, ids, label of all lines, with bad ones marked in `table`."""
    first = int(layout.has_labels)
    if layout.has_labels:
        label, is_number = parse_numbers(table.data, table.start[:, 0], table.end[:, 0])
        table.reject(~(is_number & np.isin(label, (0.0, 1.0))), 0, "label is {}, expected 0 or 1")
    else:
        label = np.full(table.line.size, np.nan)
    split = first + len(DENSE_NAMES)
    dense, is_number = parse_numbers(
        table.data, table.start[:, first:split], table.end[:, first:split]
    )
    parse = parse_decimal if layout.has_header else parse_hex
    ids, is_id = parse(table.data, table.start[:, split:], table.end[:, split:])
    kind = "decimal number below 2^64" if layout.has_header else "hexadecimal number"
    for column in np.flatnonzero(~is_number.all(axis=0)):
        reason = f"{DENSE_NAMES[column]} is {{}}, expected a number or nothing"
        table.reject(~is_number[:, column], first + int(column), reason)
    for column in np.flatnonzero(~is_id.all(axis=0)):
        reason = f"{FEATURE_NAMES[column]} is {{}}, expected a {kind} or nothing"
        table.reject(~is_id[:, column], split + int(column), reason)
    # Missing is nan here, and nan > 0 is false.
    positive = np.where(dense > 0.0, dense, 0.0)
    return elementary.log(1.0 + positive).astype(np.float32), ids, label.astype(np.float32)


def _check_last_line(block: Block, layout: _Layout, table: FieldTable) -> None:
    """Reject a last line without a newline whose last hexadecimal field was cut short."""
    if block.data.endswith(b"\n") or layout.has_header or not table.line.size:
        return
    last_line = block.first_line + block.data.count(b"\n")
    length = int(table.end[-1, -1] - table.start[-1, -1])
    if table.line[-1] == last_line and 0 < length < 8:
        is_last = table.line == last_line
        table.reject(is_last, table.start.shape[1] - 1, "the file ends within this line, at {}")


def _convert_file(
    source: Source, layout: _Layout, writer: ArrayWriter, bad: BadLines, options: OpenOptions
) -> None:
    path, is_first = source.path, True
    for block in read_blocks(path):
        if is_first and layout.has_header:
            cut = block.data.index(b"\n") + 1 if b"\n" in block.data else len(block.data)
            done, total = block.done_bytes, block.total_bytes
            block = Block(block.data[cut:], block.first_line + 1, done, total)
        is_first = False
        if block.data:
            table = split_block(block, b"\t", layout.columns)
            _check_last_line(block, layout, table)
            dense, ids, label = _parse(table, layout)
            bad.report(path, table.bad)
            good = table.good()
            columns = list(ids[good].T)
            writer.append(dense[good], columns, [None] * len(columns), label[good])
        options.progress(f"converting {path.name}", block.done_bytes, block.total_bytes)
        source.check_unchanged()


def open_criteo(where: str, options: OpenOptions) -> Dataset:
    """Open Criteo text, converting it on first use; see `open_data`."""
    paths = paths_of(where)
    cache_dir = options.need_cache_dir("criteo")
    layouts = [_layout(path, options.max_bad_lines) for path in paths]
    for path, layout in zip(paths, layouts, strict=True):
        if layout != layouts[0]:
            raise DataError(f"{path} and {paths[0]} differ in format (header, columns)")
        if options.require_labels and not layout.has_labels:
            raise DataError(
                f"{path} has {_COLUMNS - 1} columns: a test file without labels\n"
                "  do:    train and evaluate on files with labels"
            )
    layout, sources = layouts[0], [identify(path) for path in paths]
    limits = limits_of(FEATURE_NAMES, options.hash_size)

    def convert(folder: Path) -> None:
        _convert(folder, sources, layout, limits, options)

    sizes = {name: [limit.rows, limit.is_exact] for name, limit in limits.items()}
    ids = "ranks" if layout.has_header else "hexadecimal"
    identity = {"source": "criteo", "ids": ids, "hash_size": sizes}
    folder = convert_once(cache_dir, sources, identity, convert, options.waiting)
    return options.checked(load_arrays(folder, fingerprint_of(sources, identity), []))


def _convert(
    folder: Path,
    sources: list[Source],
    layout: _Layout,
    limits: dict[str, Limit],
    options: OpenOptions,
) -> None:
    # A hash function fills its range; ranks need only as many rows as there are ranks.
    features = [
        Feature(name, limit.rows if limit.is_exact or not layout.has_header else 0)
        for name, limit in limits.items()
    ]
    bounds = [limit.rows for limit in limits.values()]
    writer = ArrayWriter(folder, DENSE_NAMES, features, bounds)
    bad = BadLines(options.max_bad_lines)
    try:
        for source in sources:
            _convert_file(source, layout, writer, bad, options)
        if writer.num_samples == 0:
            raise DataError(f"{sources[0].path} holds no samples")
        notes = wrap_notes(writer.largest, limits) if layout.has_header else []
        facts = {"has_labels": layout.has_labels, "bad_lines": bad.found, "notes": notes}
        writer.finish(facts)
    finally:
        writer.close()
