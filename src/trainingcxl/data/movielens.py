"""MovieLens-100k as clicks: a rating of 4 or 5 is a click.

Reads the files of the original archive, plain or gzip: u.data, u.user, u.item, u.genre and
u.occupation. Features: user, item, age in steps of five years, gender, occupation, first two
characters of the zip code, and the item's genres (any number of 19, a jagged feature). There are no
dense columns. Samples are in the order of u.data, which is not by time.
"""

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainingcxl.data.cache import ArrayDataset, fingerprint_of, identify
from trainingcxl.data.dataset import DataReport, Dataset, Feature
from trainingcxl.data.options import OpenOptions
from trainingcxl.data.text import BadLines, open_text, parse_decimal, read_blocks, split_block
from trainingcxl.errors import DataError

__all__ = ["open_movielens"]

_CLICK_RATING = 4
_AGE_STEP = 5
_AGES = 120
_ITEM_COLUMNS = 24
_GENRES = 19
_ZIP_ROWS = 37 * 37  # two of digits, letters (case ignored) or none


def _find(folder: Path, name: str) -> Path:
    for path in (folder / name, folder / f"{name}.gz"):
        if path.exists():
            return path
    raise DataError(
        f"cannot read {folder / name}: neither it nor {name}.gz exists\n"
        "  do:    name the folder of the unpacked MovieLens-100k archive (ml-100k)"
    )


def _lines(path: Path) -> list[str]:
    """Return the lines of a latin-1 file."""
    try:
        with open_text(path) as (stream, _, _):
            text = stream.read().decode("latin-1")
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"cannot read {path}: {error}\n  do:    fetch the archive again") from error
    return text.replace("\r\n", "\n").split("\n")


class _Table:
    """Rows of one file: `fields` of each line with the wanted number of columns."""

    def __init__(self, path: Path, separator: str, columns: int, bad: BadLines) -> None:
        self.path, self._bad = path, bad
        self.rows: list[tuple[int, list[str]]] = []
        for number, line in enumerate(_lines(path), start=1):
            fields = line.split(separator)
            if len(fields) == columns:
                self.rows.append((number, fields))
            elif line:
                self.reject(number, f"{len(fields)} columns, expected {columns}")

    def reject(self, number: int, reason: str) -> None:
        self._bad.report(self.path, {number: reason})

    def number(self, line: int, what: str, text: str, least: int, most: int) -> int | None:
        """Return an integer field, or reject the line."""
        if text.isascii() and text.isdecimal() and least <= int(text) <= most:
            return int(text)
        self.reject(line, f"{what} is '{text[:40]}', expected {least} .. {most}")
        return None


def _zip_row(code: str) -> int:
    row = 0
    for character in code[:2].lower().ljust(2):
        digit = "0123456789abcdefghijklmnopqrstuvwxyz".find(character) + 1
        row = row * 37 + digit
    return row


def _users(folder: Path, names: list[str], bad: BadLines) -> dict[int, list[int]]:
    """Return age, gender, occupation and zip code as ids, by user."""
    table = _Table(_find(folder, "u.user"), "|", 5, bad)
    users = {}
    for line, (user_text, age_text, gender, occupation, code) in table.rows:
        user = table.number(line, "user", user_text, 1, 1 << 31)
        age = table.number(line, "age", age_text, 0, _AGES - 1)
        if user is None or age is None:
            continue
        if gender not in ("M", "F") or occupation not in names:
            table.reject(line, f"gender or occupation unknown: '{gender}', '{occupation[:40]}'")
            continue
        users[user] = [age // _AGE_STEP, int(gender == "F"), names.index(occupation)]
        users[user].append(_zip_row(code))
    return users


def _genres(folder: Path, bad: BadLines) -> dict[int, list[int]]:
    """Return the genres of each item."""
    table = _Table(_find(folder, "u.item"), "|", _ITEM_COLUMNS, bad)
    genres = {}
    for line, fields in table.rows:
        item = table.number(line, "item", fields[0], 1, 1 << 31)
        flags = fields[-_GENRES:]
        if item is None:
            continue
        if not set(flags) <= {"0", "1"}:
            table.reject(line, "the last 19 columns are not all 0 or 1")
            continue
        genres[item] = [g for g, flag in enumerate(flags) if flag == "1"]
    return genres


def _ratings(
    path: Path, users: dict[int, list[int]], genres: dict[int, list[int]], bad: BadLines
) -> NDArray[np.int64]:
    """Return user, item and rating of each rating, shape (n, 3)."""
    known = [np.array(list(users), np.uint64), np.array(list(genres), np.uint64)]
    expected = ("a user of u.user", "an item of u.item", "a rating of 1 to 5")
    parts = [np.empty((0, 3), dtype=np.int64)]
    for block in read_blocks(path):
        table = split_block(block, b"\t", 4)
        values, good = parse_decimal(table.data, table.start[:, :3], table.end[:, :3])
        good &= table.end[:, :3] > table.start[:, :3]
        for column, allowed in enumerate([*known, np.arange(1, 6)]):
            good[:, column] &= np.isin(values[:, column], allowed)
            table.reject(~good[:, column], column, f"{{}} is not {expected[column]}")
        bad.report(path, table.bad)
        parts.append(values[table.good()].astype(np.int64))
    ratings = np.concatenate(parts)
    if not len(ratings):
        raise DataError(f"{path} holds no samples")
    return ratings


def _jagged(lists: Sequence[list[int]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    ends = np.cumsum([len(entry) for entry in lists])
    return np.array([g for entry in lists for g in entry], dtype=np.int64), ends


def open_movielens(where: str, options: OpenOptions) -> Dataset:
    """Open a folder with the files of MovieLens-100k, or its u.data; see `open_data`."""
    path = Path(where).expanduser()
    folder = path if path.is_dir() else path.parent
    data_path = _find(folder, "u.data") if path.is_dir() else path
    bad = BadLines(options.max_bad_lines)
    occupations = [name for name in _lines(_find(folder, "u.occupation")) if name]
    users, genres = _users(folder, occupations, bad), _genres(folder, bad)
    ratings = _ratings(data_path, users, genres, bad)
    user_rows, item_rows = max(users) + 1, max(genres) + 1
    ids = np.empty((len(ratings), 6), dtype=np.int64)
    ids[:, 0], ids[:, 1] = ratings[:, 0], ratings[:, 1]
    ids[:, 2:] = [users[user] for user in ratings[:, 0].tolist()]
    values, ends = _jagged([genres[item] for item in ratings[:, 1].tolist()])
    features = (
        Feature("user", user_rows),
        Feature("item", item_rows),
        Feature("age", _AGES // _AGE_STEP),
        Feature("gender", 2),
        Feature("occupation", len(occupations)),
        Feature("zip", _ZIP_ROWS),
        Feature("genre", _GENRES, is_jagged=True),
    )
    names = ("u.user", "u.item", "u.occupation")
    sources = [identify(data_path), *(identify(_find(folder, name)) for name in names)]
    identity: dict[str, Any] = {"source": "movielens", "version": 1}
    return ArrayDataset(
        dense=np.empty((len(ratings), 0), dtype=np.float32),
        dense_names=(),
        features=features,
        ids=ids,
        jagged={"genre": (values, ends)},
        label=(ratings[:, 2] >= _CLICK_RATING).astype(np.float32),
        has_labels=True,
        fingerprint={**fingerprint_of(sources, identity), "num_samples": len(ratings)},
        report=DataReport(bad_lines=bad.found),
    )
