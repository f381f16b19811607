"""Read frozen dataclasses from TOML with units, ranges, tags and sources.

A value in a file is a plain number or string, or a table `{value = 25, tag = "C", source = "..."}`.
The tag says how well the number is known: V read in a primary text, S in a secondary one,
R recalled, C our choice, D derived by arithmetic, F fitted, M measured here, U given by the user.
"""

import dataclasses
import difflib
import math
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

from trainingcxl.sim.errors import parameter_error

__all__ = [
    "TAGS",
    "Note",
    "build",
    "nearest",
    "number",
    "read_toml",
    "series",
    "text",
    "unpack",
    "whole",
]

TAGS = ("V", "S", "R", "C", "D", "F", "M", "U")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Note:
    """Where a number comes from: a tag of `TAGS` and the source in words."""

    tag: str
    source: str


def number(low: float, high: float, unit: str, *, above: bool = False) -> Any:
    """Declare a real-valued field, allowed in [low, high], or (low, high] when `above`."""
    return field(metadata={"low": low, "high": high, "unit": unit, "above": above, "type": float})


def whole(low: int, high: int, unit: str) -> Any:
    """Declare an integer field, allowed in [low, high]."""
    return field(metadata={"low": low, "high": high, "unit": unit, "above": False, "type": int})


def series(count: int, low: float, high: float, unit: str, *, above: bool = False) -> Any:
    """Declare a field of `count` real values, each as `number` allows."""
    meta = {"low": low, "high": high, "unit": unit, "above": above, "type": float}
    return field(metadata={**meta, "count": count})


def text(*choices: str) -> Any:
    """Declare a string field; without choices any non-empty string is allowed."""
    return field(metadata={"choices": choices, "type": str, "unit": ""})


def nearest(key: str, known: Iterable[str]) -> str:
    """Return advice that names the known key closest to `key`."""
    names = sorted(known)
    close = difflib.get_close_matches(key, names, n=1, cutoff=0.5)
    listed = ", ".join(names)
    return f"did you mean '{close[0]}'? known here: {listed}" if close else f"known here: {listed}"


def read_toml(path: Path) -> dict[str, Any]:
    """Parse a TOML file; a missing or malformed one is a `ParameterError` that names it."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise parameter_error("no such file", where=str(path), do="give an existing file") from None
    except OSError as error:
        raise parameter_error(
            f"cannot be read: {error.strerror}", where=str(path), do="give a readable TOML file"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise parameter_error(
            f"not valid TOML: {error}", where=str(path), do="correct the line named above"
        ) from error


def unpack(raw: Any, *, key: str, where: str, default: Note) -> tuple[Any, Note]:
    """Split a TOML entry into its value and its note (`default` for a plain value)."""
    if not isinstance(raw, Mapping):
        return raw, default
    extra = set(raw) - {"value", "tag", "source"}
    if extra or "value" not in raw:
        bad = sorted(extra)[0] if extra else "(no value)"
        raise parameter_error(
            f"key '{key}.{bad}' is unknown",
            where=where,
            do=nearest(bad, ("value", "tag", "source")),
        )
    tag = raw.get("tag", default.tag)
    if tag not in TAGS:
        raise parameter_error(
            f"key '{key}.tag' is {tag!r}", where=where, do=f"one of {', '.join(TAGS)}"
        )
    return raw["value"], Note(tag, str(raw.get("source", default.source)))


def _checked(value: Any, meta: Mapping[str, Any], *, key: str, where: str) -> Any:
    if "count" in meta:
        count = meta["count"]
        if not isinstance(value, list | tuple) or len(value) != count:
            raise parameter_error(
                f"key '{key}' is {value!r}", where=where, do=f"a list of {count} numbers"
            )
        one = {name: item for name, item in meta.items() if name != "count"}
        return tuple(
            _checked(item, one, key=f"{key}[{k}]", where=where) for k, item in enumerate(value)
        )
    if meta["type"] is str:
        choices = meta["choices"]
        if not isinstance(value, str) or not value or (choices and value not in choices):
            wanted = f"one of {', '.join(choices)}" if choices else "a non-empty string"
            raise parameter_error(f"key '{key}' is {value!r}", where=where, do=wanted)
        return value
    low, high, unit = meta["low"], meta["high"], meta["unit"]
    sign = "(" if meta["above"] else "["
    allowed = f"a plain number in {sign}{low:g}, {high:g}] {unit}".rstrip()
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value):
        raise parameter_error(f"key '{key}' is {value!r}", where=where, do=allowed)
    outside = value < low or value > high or (meta["above"] and value == low)
    if outside or (meta["type"] is int and value != int(value)):
        if meta["type"] is int:
            allowed = f"a whole number in [{low}, {high}] {unit}".rstrip()
        raise parameter_error(f"key '{key}' is {value!r}", where=where, do=allowed)
    return meta["type"](value)


def build(
    kind: type[T], values: Mapping[str, Any], *, prefix: str, where: str | Mapping[str, str]
) -> T:
    """Build dataclass `kind` from plain values, checking keys, types and ranges.

    Args:
        kind: A dataclass whose fields were declared with `number`, `whole` or `text`.
        values: Plain values by field name.
        prefix: Dotted path of the table, used in messages.
        where: The file, or a map from field name to the file or option that set it.

    Raises:
        ParameterError: A key is unknown or missing, or a value is out of range.
    """
    fields = {f.name: f for f in dataclasses.fields(cast(Any, kind))}

    def place(name: str) -> str:
        return where if isinstance(where, str) else where.get(name, next(iter(where.values()), ""))

    checked = {}
    for name, value in values.items():
        if name not in fields:
            raise parameter_error(
                f"key '{prefix}.{name}' is unknown (value {value!r})",
                where=place(name),
                do=nearest(name, fields),
            )
        checked[name] = _checked(
            value, fields[name].metadata, key=f"{prefix}.{name}", where=place(name)
        )
    missing = [name for name in fields if name not in checked]
    if missing:
        raise parameter_error(
            f"key '{prefix}.{missing[0]}' is missing", where=place(missing[0]), do="add it"
        )
    return kind(**checked)
