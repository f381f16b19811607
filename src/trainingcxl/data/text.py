"""Text tables as arrays: lines split and numbers parsed by whole blocks, bad lines accounted for.

A block of some megabytes is split with NumPy: fields are (start, end) positions in the block's
bytes, and numbers are parsed digit by digit for all lines at once. Nothing is guessed: a field
either is a number of the expected kind or its line is reported with file, number and reason.
"""

import contextlib
import csv
import gzip
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TypeAlias

import numpy as np
from numpy.typing import NDArray

from trainingcxl.data.elementary import UInt64, mix
from trainingcxl.errors import DataError

__all__ = ["BadLines", "FieldTable", "hash_text", "parse_decimal", "parse_hex", "parse_numbers"]

Bytes: TypeAlias = NDArray[np.uint8]
Positions: TypeAlias = NDArray[np.int64]
Mask: TypeAlias = NDArray[np.bool_]

BLOCK_BYTES = 4 << 20
FIELD_BYTES_MAX = 1024
_LINE_BYTES_MAX = 64 << 20
_DIGITS_MAX = 20
_NEWLINE, _RETURN, _SPACE, _MINUS, _ZERO = 10, 13, 32, 45, 48


@dataclass(slots=True)
class BadLines:
    """Lines that could not be read; more than `limit` of them is an error.

    Attributes:
        limit: How many may be skipped.
        found: Those skipped so far, each "file, line number: reason".
    """

    limit: int
    found: list[str] = field(default_factory=list)

    def report(self, path: Path, reasons: dict[int, str], *, unit: str = "line") -> None:
        """Add the bad lines of a block, by line number; `unit` is what messages call them.

        Raises:
            DataError: More lines than allowed are bad; names the first one beyond.
        """
        for line in sorted(reasons):
            text = f"{path}, {unit} {line}: {reasons[line]}"
            if len(self.found) >= self.limit:
                raise self.error(text)
            self.found.append(text)

    def error(self, text: str) -> DataError:
        """Make the error for one bad line too many."""
        skipped = f" ({len(self.found)} bad lines before it were skipped)" if self.found else ""
        return DataError(
            f"{text}{skipped}\n"
            f"  do:    correct the line, or skip up to N bad lines with "
            f"--set data.max_bad_lines=N (now {self.limit})"
        )


@dataclass(slots=True)
class FieldTable:
    """Lines of one block that have the right number of fields.

    Attributes:
        data: The block's bytes.
        start: First byte of each field; shape (lines, columns).
        end: One past its last byte; the same shape.
        line: Number of each line in its file, from 1; shape (lines,).
        bad: Reasons why lines are bad, by line number; parsers add to it.
    """

    data: Bytes
    start: Positions
    end: Positions
    line: Positions
    bad: dict[int, str]

    def text(self, row: np.intp, column: int) -> str:
        """Return one field, shortened, for a message."""
        raw = self.data[self.start[row, column] : self.end[row, column]].tobytes()
        shown = raw[:40].decode("utf-8", "backslashreplace")
        return shown if len(raw) <= 40 else f"{shown}..."

    def reject(self, wrong: Mask, column: int, reason: str) -> None:
        """Mark lines whose field in `column` is wrong; {} in `reason` becomes the field's text."""
        for row in np.flatnonzero(wrong):
            # The first reason found for a line is the one kept.
            self.bad.setdefault(int(self.line[row]), reason.format(repr(self.text(row, column))))

    def good(self) -> Mask:
        """Return which lines have not been rejected."""
        return ~np.isin(self.line, np.fromiter(self.bad, dtype=np.int64))


@contextlib.contextmanager
def open_text(path: Path) -> Iterator[tuple[IO[bytes] | gzip.GzipFile, Callable[[], int], int]]:
    """Open a plain or gzip file, told apart by its first bytes.

    Yields:
        The text as a binary stream, a function that tells how many bytes of the file have been
        read, and the bytes of the file.

    Raises:
        DataError: The file can't be opened.
    """
    try:
        size = path.stat().st_size
        raw = path.open("rb")
        is_gzip = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
    except OSError as error:
        raise DataError(
            f"cannot read {path}: {error.strerror}\n  do:    check the path and its permissions"
        ) from error
    with raw:
        if is_gzip:
            with gzip.GzipFile(fileobj=raw) as unpacked:
                yield unpacked, raw.tell, size
        else:
            yield raw, raw.tell, size


@dataclass(frozen=True, slots=True)
class Block:
    """Whole lines of a file: `data` ends with a newline unless the file's last line has none."""

    data: bytes
    first_line: int
    done_bytes: int
    total_bytes: int


def read_blocks(path: Path, *, block_bytes: int = BLOCK_BYTES) -> Iterator[Block]:
    """Read a file as blocks of whole lines.

    Raises:
        DataError: The file can't be read, a compressed file is damaged or cut off, or a line has
            no end.
    """
    line, rest = 1, b""
    with open_text(path) as (stream, tell, total):
        while True:
            try:
                data = stream.read(block_bytes)
            except (EOFError, zlib.error, gzip.BadGzipFile, OSError) as error:
                reason = getattr(error, "strerror", None) or str(error)
                raise DataError(
                    f"{path}: reading stops after line {line - 1}: {reason}\n"
                    "  do:    the file is damaged or incomplete; fetch it again"
                ) from error
            if not data:
                break
            rest += data
            cut = rest.rfind(b"\n") + 1
            if cut:
                yield Block(rest[:cut], line, tell(), total)
                line += rest.count(b"\n", 0, cut)
                rest = rest[cut:]
            elif len(rest) > _LINE_BYTES_MAX:
                raise DataError(f"{path}, line {line}: no end of line in {len(rest)} bytes")
    if rest:
        yield Block(rest, line, total, total)


def split_block(block: Block, separator: bytes, columns: int) -> FieldTable:
    """Split a block without quotes into fields; leaves out blank lines, drops CR before LF."""
    data = block.data if block.data.endswith(b"\n") else block.data + b"\n"
    array = np.frombuffer(data, dtype=np.uint8)
    newline = np.flatnonzero(array == _NEWLINE)
    start = np.concatenate([[0], newline[:-1] + 1])
    end = newline - ((newline > start) & (array[newline - 1] == _RETURN))
    separators = np.flatnonzero(array == separator[0])
    first = np.searchsorted(separators, start)
    found = np.searchsorted(separators, end) - first + 1
    line = block.first_line + np.arange(start.size)
    is_blank = start == end
    bad = {
        int(line[row]): f"{found[row]} columns, expected {columns}"
        for row in np.flatnonzero((found != columns) & ~is_blank)
    }
    keep = (found == columns) & ~is_blank
    inner = separators[first[keep, None] + np.arange(columns - 1)[None, :]]
    return _checked(
        FieldTable(
            array,
            np.concatenate([start[keep, None], inner + 1], axis=1),
            np.concatenate([inner, end[keep, None]], axis=1),
            line[keep],
            bad,
        )
    )


def split_quoted(
    lines: Iterator[str], first_line: int, path: Path, separator: str
) -> Iterator[tuple[int, list[str]]]:
    """Parse CSV with quotes; yields (line number where the record starts, fields)."""
    reader = csv.reader(lines, delimiter=separator, strict=True)
    begins = first_line
    while True:
        try:
            record = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise DataError(
                f"{path}, line {begins}: {error}\n  do:    correct the quotes"
            ) from None
        yield begins, record
        begins = first_line + reader.line_num


def table_of_records(records: list[tuple[int, list[str]]], columns: int) -> FieldTable:
    """Make a table of records that were split elsewhere."""
    bad = {
        line: f"{len(fields)} columns, expected {columns}"
        for line, fields in records
        if fields and len(fields) != columns
    }
    kept = [(line, fields) for line, fields in records if len(fields) == columns]
    cells = [cell.encode("utf-8", "surrogateescape") for _, fields in kept for cell in fields]
    lengths = np.array([len(cell) for cell in cells], dtype=np.int64).reshape(-1, columns)
    end = np.cumsum(lengths.reshape(-1)).reshape(-1, columns)
    data = np.frombuffer(b"".join(cells) + b"\n", dtype=np.uint8)
    line = np.array([line for line, _ in kept], dtype=np.int64)
    return _checked(FieldTable(data, end - lengths, end, line, bad))


def _checked(table: FieldTable) -> FieldTable:
    length = table.end - table.start
    for column in np.flatnonzero((length > FIELD_BYTES_MAX).any(axis=0)):
        reason = f"a field has more than {FIELD_BYTES_MAX} bytes: {{}}"
        table.reject(length[:, column] > FIELD_BYTES_MAX, int(column), reason)
        # The line is rejected; emptied so that no parser works through it.
        table.end[length[:, column] > FIELD_BYTES_MAX, column] = 0
        table.start[length[:, column] > FIELD_BYTES_MAX, column] = 0
    return table


def trim(table: FieldTable) -> None:
    """Drop spaces around every field."""
    while (front := (table.start < table.end) & (table.data[table.start] == _SPACE)).any():
        table.start += front
    while (back := (table.start < table.end) & (table.data[table.end - 1] == _SPACE)).any():
        table.end -= back


def _digits(data: Bytes, start: Positions, end: Positions, base: int) -> tuple[UInt64, Mask]:
    """Parse unsigned digits; wraps beyond 64 bits. An empty field gives 0 and is good."""
    values = np.full(256, 255, dtype=np.uint8)
    for digit in range(base):
        for character in {f"{digit:x}", f"{digit:X}"}:
            values[ord(character)] = digit
    flat_start, length = start.reshape(-1), (end - start).reshape(-1)
    total = np.zeros(flat_start.shape, dtype=np.uint64)
    is_good = np.ones(flat_start.shape, dtype=np.bool_)
    # All fields of one length together: no test per digit whether the field goes on.
    for width in np.flatnonzero(np.bincount(length)).tolist():
        chosen = np.flatnonzero(length == width)
        place = flat_start[chosen]
        part = np.zeros(place.shape, dtype=np.uint64)
        worst = np.zeros(place.shape, dtype=np.uint8)
        for k in range(min(width, _DIGITS_MAX)):
            found = values[data[place + k]]
            part = part * np.uint64(base) + found
            np.maximum(worst, found, out=worst)
        total[chosen], is_good[chosen] = part, worst != 255
    return total.reshape(start.shape), is_good.reshape(start.shape)


def parse_hex(data: Bytes, start: Positions, end: Positions) -> tuple[UInt64, Mask]:
    """Parse hexadecimal numbers of up to 16 digits, upper or lower case; empty is 0.

    Returns:
        Values and whether each is good; both of the shape of `start`.
    """
    total, is_good = _digits(data, start, end, 16)
    return total, is_good & (end - start <= 16)


def parse_decimal(data: Bytes, start: Positions, end: Positions) -> tuple[UInt64, Mask]:
    """Parse integers in [0, 2^64); empty is 0.

    Returns:
        Values and whether each is good; both of the shape of `start`.
    """
    total, is_good = _digits(data, start, end, 10)
    length = end - start
    # 20 digits may pass 2^64: then the value wrapped below 10^19, or the first digit is above 1.
    is_long = (length == 20) & is_good
    if is_long.any():
        first = data[np.minimum(start, data.size - 1)]
        is_good &= ~is_long | ((first == _ZERO + 1) & (total >= np.uint64(10**19)))
        is_good |= is_long & (first == _ZERO)
    return total, is_good & (length <= 20)


def parse_numbers(
    data: Bytes, start: Positions, end: Positions
) -> tuple[NDArray[np.float64], Mask]:
    """Parse finite numbers, integers at full speed; empty is nan and good.

    Returns:
        Values and whether each is good; both of the shape of `start`.
    """
    length = end - start
    is_negative = (length > 1) & (data[np.minimum(start, data.size - 1)] == _MINUS)
    total, is_good = _digits(data, start + is_negative, end, 10)
    is_good &= length - is_negative <= 15  # exact as a double
    values = np.where(is_negative, -total.astype(np.float64), total.astype(np.float64))
    values[length == 0] = np.nan
    for place in zip(*np.nonzero(~is_good), strict=True):
        try:
            values[place] = float(data[start[place] : end[place]].tobytes())
            is_good[place] = bool(np.isfinite(values[place]))
        except ValueError:
            continue
    return values, is_good


def hash_text(data: Bytes, start: Positions, end: Positions) -> UInt64:
    """Hash texts to 64 bits: FNV-1a over the bytes, then `mix`; the same on every machine.

    Returns:
        Hashes, the shape of `start`, which must be one-dimensional.
    """
    total = np.full(start.shape, 0xCBF29CE484222325, dtype=np.uint64)
    active = np.flatnonzero(end > start)
    place = start[active]
    while active.size:
        total[active] = (total[active] ^ data[place]) * np.uint64(0x100000001B3)
        place = place + 1
        more = place < end[active]
        active, place = active[more], place[more]
    return mix(total)
