"""Settings of a training run: their defaults, their meaning, and what a change of each one does.

A setting is named `section.key`. Its value is the default, unless the TOML file of `--config` has
it, unless `--set section.key=value` has it, unless a command-line flag of its own has it: the later
wins. Nothing else is read.
"""

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import Field, dataclass, field, fields, is_dataclass, replace
from difflib import get_close_matches
from enum import Enum
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar

from trainingcxl.errors import ConfigError
from trainingcxl.setting_values import hash_sizes, is_count, widths, wrong_value

__all__ = [
    "CacheSettings",
    "DataSettings",
    "DenseSettings",
    "Difference",
    "Effect",
    "EvalSettings",
    "ModelSettings",
    "PoolSettings",
    "RowSettings",
    "RunSettings",
    "ScheduleSettings",
    "Settings",
    "Value",
    "differences",
    "effect_of",
    "load_settings",
    "show_settings",
]

Value = int | float | str | bool
T = TypeVar("T", int, float, str, bool)


class Effect(Enum):
    """What another value of a setting does to a run that is resumed with it."""

    RESULT = "result"
    ROUNDING = "on the last bits"
    NONE = "none on the bits"


def _key(
    default: T,
    meaning: str,
    *,
    effect: Effect = Effect.RESULT,
    choices: tuple[str, ...] = (),
    least: float = 0,
) -> T:
    """Declare a setting: a string among `choices` if there are any, a number >= `least`."""
    metadata = {"meaning": meaning, "effect": effect, "choices": choices, "least": least}
    declared: T = field(default=default, metadata=metadata)
    return declared


class _Section:
    """Checks every value of a section against its declaration."""

    __slots__ = ()

    def __post_init__(self) -> None:
        assert is_dataclass(self)
        section = next(name for name, kind in _SECTIONS.items() if kind is type(self))
        for declared in fields(self):
            _check(f"{section}.{declared.name}", declared, getattr(self, declared.name))


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSettings(_Section):
    """How long and in which steps to train."""

    epochs: int = _key(1, "passes over the training data; more continue a run", effect=Effect.NONE)
    batch_size: int = _key(2048, "samples of a batch", least=1)
    seed: int = _key(0, "seed of all initial values and of shuffling")
    threads: int = _key(0, "of torch and of the engine; 0 is one a core", effect=Effect.ROUNDING)
    dense_every: str = _key(
        "auto",
        "batches between two logs of the dense part; auto keeps them within 2 % of the time",
        effect=Effect.NONE,
    )
    device: str = _key(
        "auto",
        "where the dense part computes; auto takes a GPU when there is one",
        effect=Effect.ROUNDING,
        choices=("auto", "cpu", "cuda"),
    )

    strict: bool = _key(
        False, "another torch, CPU or thread count than the pool's is an error", effect=Effect.NONE
    )

    def __post_init__(self) -> None:
        """Check that `dense_every` is auto or a count."""
        _Section.__post_init__(self)
        if self.dense_every != "auto" and not is_count(self.dense_every):
            raise wrong_value("run.dense_every", self.dense_every, "auto or a number of at least 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSettings(_Section):
    """Shape of the DLRM."""

    embedding_dim: int = _key(16, "width of an embedding row", least=1)
    bottom: str = _key("512-256", "hidden layers of the bottom MLP; one of embedding_dim follows")
    top: str = _key("512-256", "hidden layers of the top MLP; one of width 1 follows")
    interaction: str = _key("dot", "how the features meet", choices=("dot",))

    def __post_init__(self) -> None:
        """Check that the MLPs are lists of widths."""
        _Section.__post_init__(self)
        widths("model.bottom", self.bottom)
        widths("model.top", self.top)


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseSettings(_Section):
    """Optimizer of the dense part."""

    optimizer: str = _key("adam", "optimizer of the dense part", choices=("adam", "sgd", "adagrad"))
    lr: float = _key(0.001, "learning rate of the dense part")
    gemm: str = _key(
        "auto",
        "matrix products on a CPU; auto measures once and keeps the faster: mkl is torch's own",
        effect=Effect.ROUNDING,
        choices=("auto", "mkl", "onednn"),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class RowSettings(_Section):
    """Optimizer and initial values of the embedding rows."""

    optimizer: str = _key(
        "rowwise-adagrad",
        "optimizer of the embedding rows",
        choices=("rowwise-adagrad", "adagrad", "sgd"),
    )
    lr: float = _key(0.02, "learning rate of the rows")
    eps: float = _key(1e-8, "added to the root of the squares; unused by sgd")
    init_scale: float = _key(
        0.0, "rows start uniform in [-x, x]; 0 is 1/sqrt(rows of the table), as in DLRM"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleSettings(_Section):
    """Factor on both learning rates, a function of the number of batches trained."""

    warmup: int = _key(0, "batches over which the rates rise from 0")
    decay_start: int = _key(0, "batch at which the rates begin to fall; unused without decay")
    decay_batches: int = _key(0, "batches over which the rates fall to 0 (square law); 0 is never")


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSettings(_Section):
    """Where samples come from."""

    source: str = _key("synthetic:small", "KIND:WHERE, for instance criteo:day_0.gz,day_1.gz")
    schema: str = _key("", "TOML file that describes the columns of csv: and parquet:")
    hash_size: str = _key(
        "0", "most rows of a table, larger ids wrap around: a number (0 chooses), or NAME=N,..."
    )
    shuffle: bool = _key(False, "another order in every epoch")
    max_bad_lines: int = _key(0, "bad lines to pass over with a warning before stopping")

    def __post_init__(self) -> None:
        """Check that `hash_size` can be read."""
        _Section.__post_init__(self)
        hash_sizes(self.hash_size)


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheSettings(_Section):
    """Copies of text data as arrays, made once."""

    dir: str = _key("", "folder of converted text; empty is inside the pool", effect=Effect.NONE)


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalSettings(_Section):
    """Evaluation on samples that are never trained on."""

    fraction: float = _key(0.1, "share of the data that is held out")
    split: str = _key(
        "last",
        "held out: the last part, or a random one chosen by run.seed",
        choices=("last", "random"),
    )
    every: int = _key(0, "batches between evaluations; 0 is once an epoch")
    patience: int = _key(0, "evaluations without a better AUC before stopping early; 0 is never")

    def __post_init__(self) -> None:
        """Check that something is left to train on, and to judge by."""
        _Section.__post_init__(self)
        if self.fraction >= 1:
            raise wrong_value("eval.fraction", self.fraction, "a number in [0, 1)")
        if self.patience and not self.fraction:
            raise wrong_value("eval.patience", self.patience, "0 while eval.fraction is 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolSettings(_Section):
    """The persistent memory pool."""

    path: str = _key("training.pool", "directory of the pool", effect=Effect.NONE)
    device: str = _key("", "DAX device for tables and log: /dev/dax0.0", effect=Effect.NONE)
    durability: str = _key(
        "auto",
        "what every batch survives: process (kill -9) or power (loss of power); auto: the pool's "
        "own, process for a new one",
        choices=("auto", "process", "power"),
    )
    resume: str = _key(
        "exact",
        "exact: the bits of a run that never failed; latest: newest rows, older dense part",
        effect=Effect.NONE,
        choices=("exact", "latest"),
    )
    log_bytes: int = _key(0, "size of the undo log; 0 grows with the batches", effect=Effect.NONE)
    keep_dense: str = _key(
        "auto",
        "dense parts kept for rewind beyond the last two, 0 to 14; auto: in a tenth of the log",
        effect=Effect.NONE,
        choices=("auto", *map(str, range(15))),
    )
    lookup: str = _key(
        "strict",
        "strict, or relaxed: looked up before the update of the batch before, then corrected",
        effect=Effect.ROUNDING,
        choices=("strict", "relaxed"),
    )
    undo_log: str = _key(
        "auto",
        "who writes it: background (a thread ahead of the step), fused (the update itself), auto",
        effect=Effect.NONE,
        choices=("auto", "background", "fused"),
    )
    lag_max: int = _key(
        16, "power on a file: commits that may wait for a sync", effect=Effect.NONE, least=1
    )
    journal_bytes: int = _key(
        0, "power on a file: first size of the journal; 0 by the batches", effect=Effect.NONE
    )
    check_rows: bool = _key(
        False, "new tables: a checksum in every row, for verify; kept by a pool", effect=Effect.NONE
    )
    rows_per_batch_max: int = _key(0, "rows a batch may change; 0: by data", effect=Effect.NONE)
    lookahead: int = _key(1, "batches announced ahead", effect=Effect.NONE)
    trust_after_reboot: bool = _key(
        False,
        "open a pool of level process although the machine restarted under it",
        effect=Effect.NONE,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """All settings of a training run; each section belongs to the component that it configures."""

    run: RunSettings = field(default_factory=RunSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    dense: DenseSettings = field(default_factory=DenseSettings)
    rows: RowSettings = field(default_factory=RowSettings)
    schedule: ScheduleSettings = field(default_factory=ScheduleSettings)
    data: DataSettings = field(default_factory=DataSettings)
    cache: CacheSettings = field(default_factory=CacheSettings)
    eval: EvalSettings = field(default_factory=EvalSettings)
    pool: PoolSettings = field(default_factory=PoolSettings)

    def flat(self) -> dict[str, Value]:
        """Return every setting by its full name."""
        return {name: _value(self, name) for name in _DECLARED}

    def with_values(self, values: Mapping[str, Any]) -> "Settings":
        """Return a copy with some settings replaced.

        Args:
            values: New values by full name. An int is taken for a float, and for a string.

        Raises:
            ConfigError: A name is unknown (the nearest known one is named), or a value has the
                wrong type or is out of range.
        """
        changed: dict[str, dict[str, Value]] = {}
        for name, value in values.items():
            section, key = _known(name).split(".")
            changed.setdefault(section, {})[key] = _convert(name, value)
        sections = {name: replace(getattr(self, name), **keys) for name, keys in changed.items()}
        return replace(self, **sections)


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """A setting whose value now is not the one that the pool was trained with."""

    name: str
    recorded: Value
    current: Value
    effect: Effect


def _default(name: str) -> Value:
    default: Any = _DECLARED[name].default
    return default  # type: ignore[no-any-return]


def _value(settings: Settings, name: str) -> Value:
    section, key = name.split(".")
    value: Value = getattr(getattr(settings, section), key)
    return value


_SECTIONS: dict[str, Any] = {section.name: section.type for section in fields(Settings)}
_DECLARED: dict[str, "Field[Any]"] = {
    f"{section}.{key.name}": key for section, kind in _SECTIONS.items() for key in fields(kind)
}


def _known(name: str) -> str:
    """Return `name` if it is a setting; name the nearest one if not."""
    if name in _DECLARED:
        return name
    key = name.rpartition(".")[2]
    same_key = [known for known in _DECLARED if known.endswith(f".{key}")]
    nearest = same_key or get_close_matches(name, _DECLARED, n=1)
    hint = f"; the nearest is {nearest[0]!r}" if nearest else ""
    raise ConfigError(
        f"there is no setting {name!r}{hint}\n"
        "  do:    'trainingcxl train --show-config' lists every setting and its meaning"
    )


def _convert(name: str, value: object) -> Value:
    """Take an int where a float or a string is wanted; `_check` judges the rest."""
    wanted = _DECLARED[name].type
    if type(value) is int and wanted in (float, str):
        return float(value) if wanted is float else str(value)
    if type(value) is not wanted:
        raise wrong_value(name, value, f"a value of type {_type_name(wanted)}")
    converted: Value = value  # type: ignore[assignment]
    return converted


def _parse(name: str, text: str) -> Value:
    """Read the text of `--set` as the type of the setting."""
    wanted = _DECLARED[name].type
    try:
        if wanted is bool:
            return {"true": True, "false": False}[text.lower()]
        if wanted is int:
            return int(text.replace("_", ""))
        return float(text) if wanted is float else text
    except (KeyError, ValueError):
        raise wrong_value(name, text, f"a value of type {_type_name(wanted)}") from None


def _type_name(wanted: object) -> str:
    names = {bool: "true or false", int: "whole number", float: "number", str: "string"}
    return names[wanted]  # type: ignore[index]


def _check(name: str, declared: "Field[Any]", value: Any) -> None:
    if type(value) is not declared.type:
        raise wrong_value(name, value, f"a value of type {_type_name(declared.type)}")
    choices, least = declared.metadata["choices"], declared.metadata["least"]
    if choices and value not in choices:
        raise wrong_value(name, value, "one of " + ", ".join(choices))
    if isinstance(value, int | float) and not (isfinite(value) and value >= least):
        raise wrong_value(name, value, f"a number of at least {least}")


def load_settings(
    *,
    config_file: Path | None = None,
    assignments: Iterable[str] = (),
    flags: Mapping[str, Any] | None = None,
) -> Settings:
    """Return the settings of a run: defaults, then the file, then assignments, then flags.

    Args:
        config_file: TOML file with a table for each section.
        assignments: Texts `section.key=value`.
        flags: Values by full name; None means that the flag was not given.

    Raises:
        ConfigError: A name is unknown, a value has the wrong type or range, the file is not TOML.
        OSError: The file cannot be read.
    """
    settings = Settings()
    if config_file is not None:
        settings = settings.with_values(_read_toml(config_file))
    settings = settings.with_values(dict(_read_assignment(text) for text in assignments))
    given = {name: value for name, value in (flags or {}).items() if value is not None}
    return settings.with_values(given)


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} is not TOML: {error}\n"
            "  do:    write it like the output of 'trainingcxl train --show-config'"
        ) from None
    values: dict[str, Any] = {}
    for section, table in tables.items():
        if not isinstance(table, dict):
            _known(section)
            raise wrong_value(section, table, "a table of settings")
        values |= {f"{section}.{key}": value for key, value in table.items()}
    return values


def _read_assignment(text: str) -> tuple[str, Value]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"--set {text!r} has no '='\n  do:    write --set section.key=value")
    return _known(name.strip()), _parse(name.strip(), value.strip())


def show_settings(settings: Settings) -> str:
    """Return every setting as TOML that `--config` reads, with its default and meaning."""
    blocks = []
    for section in _SECTIONS:
        names = [name for name in _DECLARED if name.startswith(f"{section}.")]
        lines = [_show(name, _value(settings, name)) for name in names]
        blocks.append("\n".join([f"[{section}]", *lines]))
    return "\n\n".join(blocks)


def _show(name: str, value: Value) -> str:
    declared = _DECLARED[name]
    meaning = declared.metadata["meaning"]
    if declared.metadata["choices"]:
        meaning += " [" + "|".join(declared.metadata["choices"]) + "]"
    effect = {
        Effect.RESULT: "fixed for a run",
        Effect.ROUNDING: "may change, last bits may differ",
        Effect.NONE: "may change",
    }[declared.metadata["effect"]]
    assignment = f"{name.partition('.')[2]} = {_toml(value)}"
    return f"{assignment:<34}# default {_toml(_default(name))}; {meaning}; {effect}"


def _toml(value: Value) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"'
    return repr(value)


def effect_of(name: str, settings: Settings) -> Effect:
    """Return what another value of a setting would do to a run that is trained with `settings`."""
    effect: Effect = _DECLARED[name].metadata["effect"]
    if name == "eval.every" and settings.eval.patience == 0:
        return Effect.NONE  # without early stopping, evaluation only looks
    return effect


def differences(recorded: Mapping[str, Value], current: Settings) -> list[Difference]:
    """Compare the settings that a pool was trained with to those given now.

    Args:
        recorded: `Settings.flat()` of the earlier run. A setting that it lacks had its default;
            one that this version lacks is passed over.
        current: The settings given now.

    Returns:
        What differs, in the order of `--show-config`. The path of the pool is never compared.
    """
    found = []
    for name in _DECLARED:
        old, new = recorded.get(name, _default(name)), _value(current, name)
        if old != new and name != "pool.path":
            effect = effect_of(name, current)
            found.append(Difference(name=name, recorded=old, current=new, effect=effect))
    return found
