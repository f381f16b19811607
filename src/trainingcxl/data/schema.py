"""The schema of `csv:` and `parquet:` sources, a TOML file: which column is what (docs/data.md)."""

import difflib
import json
import tomllib
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from trainingcxl.errors import ConfigError

__all__ = ["CsvFormat", "DenseColumn", "LabelColumn", "Schema", "SparseColumn", "load_schema"]

_KINDS = ("hash", "modulo", "id")
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class CsvFormat:
    """How a text table is written.

    Attributes:
        separator: One character between fields.
        header: Whether the first line names the columns; else they are column_1, column_2, ...
        trim: Whether spaces around fields are dropped.
        missing: Texts that stand for a missing value.
    """

    separator: str = ","
    header: bool = True
    trim: bool = False
    missing: list[str] = field(default_factory=lambda: [""])

    def __post_init__(self) -> None:
        """Check the separator."""
        if len(self.separator.encode()) != 1 or self.separator in '"\r\n':
            raise ConfigError(f"csv.separator is {self.separator!r}, must be one ASCII character")


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelColumn:
    """The label: a column of 0 and 1, of texts, or of numbers with a threshold.

    Attributes:
        column: Its name.
        positive: Texts that mean 1; all others mean 0.
        threshold: Numbers from this one on mean 1.
    """

    column: str
    positive: list[str] | None = None
    threshold: float | None = None

    def __post_init__(self) -> None:
        """Check that there is one rule."""
        if self.positive is not None and self.threshold is not None:
            raise ConfigError("label: give either positive or threshold")


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseColumn:
    """A number. Missing becomes 0.

    Attributes:
        column: Its name.
        log: Whether it becomes log1p(max(value, 0)).
    """

    column: str
    log: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class SparseColumn:
    """A category, or a list of them.

    Attributes:
        column: Its name, also the feature's.
        kind: "hash": texts or integers, spread over rows 1 .. rows - 1, missing is row 0;
            "modulo": integers modulo rows; "id": integers below rows, used as they are.
        rows: Rows of the table; 0 chooses (hash, modulo: `hash_size`; id: the largest + 1).
        missing: Id of missing values ("modulo" and "id"); without it, "id" refuses them.
        split: Character between several values in one field of text.
    """

    column: str
    kind: str = "hash"
    rows: int = 0
    missing: int | None = None
    split: str = ""

    def __post_init__(self) -> None:
        """Check kind and range."""
        where = f"sparse column '{self.column}'"
        if self.kind not in _KINDS:
            raise ConfigError(f"{where}: kind is '{self.kind}', must be one of {', '.join(_KINDS)}")
        if not 0 <= self.rows < 1 << 62:
            raise ConfigError(f"{where}: rows is {self.rows}, must be in [0, 2^62)")
        if self.missing is not None and not 0 <= self.missing < (self.rows or 1 << 62):
            raise ConfigError(f"{where}: missing is {self.missing}, must be a row of the table")
        if len(self.split.encode()) > 1:
            raise ConfigError(f"{where}: split is {self.split!r}, must be one ASCII character")


@dataclass(frozen=True, kw_only=True, slots=True)
class Schema:
    """All columns of a source."""

    csv: CsvFormat = field(default_factory=CsvFormat)
    label: LabelColumn | None = None
    dense: list[DenseColumn] = field(default_factory=list)
    sparse: list[SparseColumn] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Check names."""
        names = [column.column for column in self.sparse]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigError(f"schema: sparse column named twice: {', '.join(twice)}")
        if not self.sparse:
            raise ConfigError("schema: there is no [[sparse]] column, so nothing to embed")

    def columns(self) -> list[str]:
        """Return the names of all columns that are read."""
        label = [] if self.label is None else [self.label.column]
        return [*label, *(c.column for c in self.dense), *(c.column for c in self.sparse)]

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return asdict(self)

    def as_toml(self) -> str:
        """Return the text of a schema file."""
        parts = [_section("[csv]", self.csv)]
        if self.label is not None:
            parts.append(_section("[label]", self.label))
        parts += [_section("[[dense]]", column) for column in self.dense]
        parts += [_section("[[sparse]]", column) for column in self.sparse]
        return "\n".join(parts)


def _section(title: str, part: CsvFormat | LabelColumn | DenseColumn | SparseColumn) -> str:
    """Write one table, leaving out what has its default."""
    lines = [title]
    for key in fields(part):
        value = getattr(part, key.name)
        make = key.default_factory
        default = key.default if make is MISSING else make()
        if value != default:
            # JSON's strings, numbers, booleans and lists are TOML's too.
            lines.append(f"{key.name} = {json.dumps(value)}")
    return "\n".join(lines) + "\n"


def _make(kind: type[T], values: Any, where: str) -> T:
    """Build a dataclass from a TOML table; unknown keys and wrong types are errors."""
    known = {key.name: key for key in fields(kind)}  # type: ignore[arg-type]
    if not isinstance(values, dict):
        raise ConfigError(f"{where} must be a table")
    for name, value in values.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
            raise ConfigError(f"{where}: unknown key '{name}'\n  do:    did you mean '{near}'?")
        expected = (list,) if name == "missing" and kind is CsvFormat else _TYPES[name]
        is_bool = isinstance(value, bool)
        if not isinstance(value, expected) or is_bool != (expected == (bool,)):
            raise ConfigError(f"{where}: {name} is {value!r}, must be {_NAMES[expected[0]]}")
        if isinstance(value, list) and not all(isinstance(entry, str) for entry in value):
            raise ConfigError(f"{where}: {name} is {value!r}, must be a list of texts")
    if "column" in known and "column" not in values:
        raise ConfigError(f"{where}: 'column' is missing")
    return kind(**values)


_TYPES: dict[str, tuple[type, ...]] = {
    "separator": (str,), "header": (bool,), "trim": (bool,), "missing": (int,),
    "column": (str,), "positive": (list,), "threshold": (float, int), "log": (bool,),
    "kind": (str,), "rows": (int,), "split": (str,),
}  # fmt: skip
_NAMES: dict[type, str] = {
    str: "a text", bool: "true or false", int: "an integer", list: "a list of texts",
    float: "a number",
}  # fmt: skip


def load_schema(path: Path) -> Schema:
    """Read a schema file.

    Raises:
        ConfigError: It can't be read; an unknown key is named with the nearest known one.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the schema {path}: {error}") from error
    for name in table:
        if name not in ("csv", "label", "dense", "sparse"):
            raise ConfigError(
                f"{path}: unknown section '{name}'\n  do:    known are csv, label, dense, sparse"
            )
    try:
        return Schema(
            csv=_make(CsvFormat, table.get("csv", {}), "[csv]"),
            label=_make(LabelColumn, table["label"], "[label]") if "label" in table else None,
            dense=_list(DenseColumn, table, "dense"),
            sparse=_list(SparseColumn, table, "sparse"),
        )
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _list(kind: type[T], table: dict[str, Any], name: str) -> list[T]:
    entries = table.get(name, [])
    if not isinstance(entries, list):
        raise ConfigError(f"{name} must be written [[{name}]], once for each column")
    return [_make(kind, entry, f"[[{name}]] number {i + 1}") for i, entry in enumerate(entries)]
