"""Models: embedding tables, MLPs and batch size, read from TOML, and their derived sizes."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from trainingcxl.sim.errors import parameter_error
from trainingcxl.sim.hardware import DATA
from trainingcxl.sim.parameters import build, nearest, number, read_toml, text, whole

__all__ = ["FLOAT_BYTES", "Locality", "Model", "Tables", "find_model", "load_models", "model_set"]

FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """`count` embedding tables of one shape; `lookups` rows of each are read per sample."""

    count: int = whole(1, 100_000, "tables")
    rows: int = whole(1, 1 << 48, "rows per table")
    lookups: int = whole(1, 100_000, "lookups per sample")
    dim: int = whole(1, 65_536, "floats per row")


@dataclass(frozen=True, slots=True, kw_only=True)
class Locality:
    """How a batch's lookups repeat.

    `reuse` is the share of lookups that hit a row used by the previous batch; `unique_share` is
    distinct rows over lookups. The balances are the load of the busiest channel over the mean, of
    the rows looked up and of the distinct rows.
    """

    reuse: float = number(0, 1, "share of lookups")
    unique_share: float = number(0, 1, "distinct rows over lookups", above=True)
    lookup_balance: float = number(1, 4096, "x mean")
    update_balance: float = number(1, 4096, "x mean")


PAPER_LOCALITY = Locality(reuse=0.80, unique_share=0.25, lookup_balance=1.0, update_balance=1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    name: str = text()
    batch: int = whole(1, 1 << 24, "samples")
    interaction: str = text("dot", "cat")
    source: str = text()


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A recommendation model (paper: RM1 to RM4) and the locality of its lookups."""

    name: str
    batch: int
    interaction: str
    source: str
    bottom: tuple[int, ...]
    top: tuple[int, ...]
    tables: tuple[Tables, ...]
    locality: Locality = PAPER_LOCALITY

    @property
    def num_tables(self) -> int:
        """Number of embedding tables."""
        return sum(t.count for t in self.tables)

    @property
    def lookups(self) -> int:
        """Rows read per batch, repeats counted."""
        return self.batch * sum(t.count * t.lookups for t in self.tables)

    @property
    def lookup_bytes(self) -> int:
        """Bytes of the rows read per batch, repeats counted."""
        return self.batch * sum(t.count * t.lookups * t.dim * FLOAT_BYTES for t in self.tables)

    @property
    def update_rows(self) -> float:
        """Distinct rows changed per batch."""
        return self.lookups * self.locality.unique_share

    @property
    def update_bytes(self) -> float:
        """Bytes of the distinct rows changed per batch."""
        return self.lookup_bytes * self.locality.unique_share

    @property
    def pooled_width(self) -> int:
        """Floats per sample of all reduced embeddings."""
        return sum(t.count * t.dim for t in self.tables)

    @property
    def pooled_bytes(self) -> int:
        """Bytes of the reduced embeddings of a batch, which cross the link each way."""
        return self.batch * self.pooled_width * FLOAT_BYTES

    @property
    def table_bytes(self) -> int:
        """Bytes of all embedding tables."""
        return sum(t.count * t.rows * t.dim * FLOAT_BYTES for t in self.tables)

    @property
    def interaction_width(self) -> int:
        """Inputs of the top MLP per sample."""
        if self.interaction == "cat":
            return self.pooled_width + self.bottom[-1]
        vectors = self.num_tables + 1
        return vectors * (vectors - 1) // 2 + self.bottom[-1]

    @property
    def layers(self) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]:
        """(inputs, outputs) of each layer of the bottom and of the top MLP."""
        top = (self.interaction_width, *self.top)
        return (
            tuple(pairwise(self.bottom)),
            tuple(pairwise(top)),
        )

    @property
    def dense_bytes(self) -> int:
        """Bytes of all MLP parameters."""
        bottom, top = self.layers
        return FLOAT_BYTES * sum(i * o + o for i, o in (*bottom, *top))

    def with_locality(self, locality: Locality) -> "Model":
        """Return the same model with other lookup statistics."""
        return replace(self, locality=locality)


def _widths(raw: Any, *, key: str, where: str) -> tuple[int, ...]:
    good = isinstance(raw, list | tuple) and len(raw) >= 2
    if not good or not all(type(w) is int and 1 <= w <= 1 << 20 for w in raw):
        raise parameter_error(
            f"key '{key}' is {raw!r}",
            where=where,
            do="a list of at least 2 whole numbers in [1, 1048576]",
        )
    return tuple(raw)


def model_from(entry: Mapping[str, Any], *, where: str) -> Model:
    """Check one `[[model]]` entry.

    Raises:
        ParameterError: A key is unknown or missing, or a value is out of range or contradictory.
    """
    entry = dict(entry)
    name = str(entry.get("name", "model"))
    rest = {k: entry.pop(k) for k in ("bottom", "top", "table", "locality", "set") if k in entry}
    shape = build(_Shape, {"source": "U", **entry}, prefix=name, where=where)
    for needed in ("bottom", "top", "table"):
        if needed not in rest:
            raise parameter_error(f"key '{name}.{needed}' is missing", where=where, do="add it")
    top = [1, *rest["top"]] if isinstance(rest["top"], list) else rest["top"]
    groups = rest["table"]
    if not isinstance(groups, list) or not groups or not all(isinstance(g, dict) for g in groups):
        raise parameter_error(
            f"key '{name}.table' is {groups!r}",
            where=where,
            do="a list of {count, rows, lookups, dim}",
        )
    model = Model(
        name=shape.name,
        batch=shape.batch,
        interaction=shape.interaction,
        source=shape.source,
        bottom=_widths(rest["bottom"], key=f"{name}.bottom", where=where),
        top=_widths(top, key=f"{name}.top", where=where)[1:],
        tables=tuple(build(Tables, g, prefix=f"{name}.table", where=where) for g in groups),
        locality=build(
            Locality,
            {**asdict(PAPER_LOCALITY), **rest.get("locality", {})},
            prefix=f"{name}.locality",
            where=where,
        ),
    )
    _check_interaction(model, where=where)
    return model


def _check_interaction(model: Model, *, where: str) -> None:
    dims = {t.dim for t in model.tables} | {model.bottom[-1]}
    if model.interaction == "dot" and len(dims) > 1:
        raise parameter_error(
            f"key '{model.name}.interaction' is 'dot' with row widths {sorted(dims)}",
            where=where,
            do="give all tables and the last bottom layer one width, or use 'cat'",
        )


def load_models(path: Path) -> list[Model]:
    """Read a file with one model at top level or several `[[model]]` entries."""
    tree = read_toml(path)
    entries = tree.get("model", [tree])
    if "model" in tree and set(tree) != {"model"}:
        bad = sorted(set(tree) - {"model"})[0]
        raise parameter_error(f"key '{bad}' is unknown", where=str(path), do="known here: model")
    return [model_from(e, where=str(path)) for e in entries]


def model_set(name: str) -> list[Model]:
    """Return the shipped models of a set: paper, deeprecinfra, mlperf or host."""
    path = DATA / "workloads.toml"
    entries = read_toml(path)["model"]
    known = dict.fromkeys(e["set"] for e in entries)
    if name not in known:
        raise parameter_error(
            f"model set {name!r} is unknown", where=path.name, do=nearest(name, known)
        )
    return [model_from(e, where=path.name) for e in entries if e["set"] == name]


def find_model(name: str) -> Model:
    """Return a model by shipped name (as RM2, rm2, DLRM) or from a TOML file path."""
    path = DATA / "workloads.toml"
    shipped = {e["name"]: e for e in read_toml(path)["model"]}
    if name in shipped:
        return model_from(shipped[name], where=path.name)
    if name.endswith(".toml"):
        models = load_models(Path(name))
        if len(models) != 1:
            raise parameter_error(
                f"{len(models)} models in the file",
                where=name,
                do="give a file with exactly one model",
            )
        return models[0]
    raise parameter_error(
        f"model {name!r} is unknown",
        where="--model",
        do=nearest(name, shipped) + ", or a .toml file",
    )
