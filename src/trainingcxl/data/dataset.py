"""What every source of data becomes: samples read by number, in any order."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainingcxl.data.permutation import Permutation
from trainingcxl.data.synthetic import DENSE_FIELDS, SyntheticGenerator
from trainingcxl.data.synthetic_presets import SyntheticSpec
from trainingcxl.errors import DataError

__all__ = ["Dataset", "Feature", "Jagged", "Rows", "Subset", "SyntheticDataset", "split_dataset"]


@dataclass(frozen=True, slots=True)
class Feature:
    """One categorical column.

    Attributes:
        name: Its name, unique in the data set.
        cardinality: Rows a table needs: every id is in [0, cardinality).
        is_jagged: Whether a sample may have any number of ids (multi-hot).
        largest_source_id: Largest id before it was taken modulo `cardinality` (of hashed values:
            after hashing); None where ids are computed.
    """

    name: str
    cardinality: int
    is_jagged: bool = False
    largest_source_id: int | None = None


@dataclass(frozen=True, slots=True)
class Jagged:
    """Ids of one jagged feature.

    Attributes:
        values: The ids, sample after sample; int64, shape (sum of lengths,).
        lengths: How many each sample has; int64, shape (n,).
    """

    values: NDArray[np.int64]
    lengths: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Rows:
    """Some samples of a data set, n of them, in the order asked for.

    Attributes:
        dense: float32, shape (n, number of dense columns).
        ids: Ids of the single-valued features in their order, int64, shape (n, how many).
        jagged: Ids of the jagged features by name.
        label: float32, shape (n,); nan where the source has no labels.
    """

    dense: NDArray[np.float32]
    ids: NDArray[np.int64]
    jagged: dict[str, Jagged]
    label: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class DataReport:
    """What was noticed while the source was read.

    Attributes:
        bad_lines: Skipped lines, each as "file, line number: reason".
        notes: One line each about choices made for the user (ids taken modulo, say).
    """

    bad_lines: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class Dataset(ABC):
    """Samples 0 .. num_samples - 1. Reading is thread-safe and changes nothing.

    Attributes:
        num_samples: How many there are.
        dense_names: Names of the dense columns.
        features: The categorical columns.
        has_labels: Whether labels are known.
        fingerprint: JSON-able facts that identify the data; equal data has an equal fingerprint on
            every machine. A resumed run compares it.
        report: What was noticed while the source was read.
    """

    num_samples: int
    dense_names: tuple[str, ...]
    features: tuple[Feature, ...]
    has_labels: bool
    fingerprint: dict[str, Any]
    report: DataReport

    @abstractmethod
    def read(self, samples: NDArray[np.int64]) -> Rows:
        """Return the samples with the given numbers: int64, (n,), each in [0, num_samples)."""

    @property
    def num_dense(self) -> int:
        """Number of dense columns."""
        return len(self.dense_names)

    @property
    def cardinalities(self) -> dict[str, int]:
        """Rows that a table needs, by feature."""
        return {feature.name: feature.cardinality for feature in self.features}

    def check_tables(self, rows: Mapping[str, int]) -> None:
        """Check that every id fits the tables of a model, before anything is trained.

        Args:
            rows: Rows of the table of each feature, by feature name.

        Raises:
            DataError: A feature is unknown, or has ids beyond its table; names both ranges.
        """
        for name, table_rows in rows.items():
            feature = next((f for f in self.features if f.name == name), None)
            if feature is None:
                known = ", ".join(self.cardinalities)
                raise DataError(f"the data has no feature '{name}'\n  do:    it has {known}")
            if feature.cardinality > table_rows:
                raise range_error(name, feature.cardinality, table_rows)

    def _check_samples(self, samples: NDArray[np.int64]) -> None:
        if samples.size and not 0 <= samples.min() <= samples.max() < self.num_samples:
            raise IndexError(
                f"sample {samples.min()} .. {samples.max()} asked for, "
                f"the data has [0, {self.num_samples})"
            )


def range_error(name: str, id_range: int, table_rows: int) -> DataError:
    """Make the error for data that was prepared with a larger id range than the model's table."""
    return DataError(
        f"feature '{name}': the data was made with ids in [0, {id_range}), the table has "
        f"{table_rows} rows\n"
        f"  do:    --set data.hash_size={table_rows} takes ids modulo the table's rows "
        f"(data.hash_size={name}={table_rows} for this feature only), or use a table of "
        f"{id_range} rows"
    )


class SyntheticDataset(Dataset):
    """The built-in data set; nothing is stored."""

    def __init__(self, spec: SyntheticSpec, *, native: bool | None = None) -> None:
        """Prepare the generator; see `SyntheticGenerator` for `native`."""
        self.spec = spec
        self.generator = SyntheticGenerator(spec, native=native)
        self.num_samples = spec.num_samples
        self.dense_names = tuple(f"I{k + 1}" for k in range(len(DENSE_FIELDS)))
        self.features = tuple(
            Feature(f"C{j + 1}", rows, is_jagged=hotness > 1)
            for j, (rows, hotness) in enumerate(zip(spec.cardinalities, spec.hotness, strict=True))
        )
        self.has_labels = True
        self.report = DataReport()
        self.fingerprint = {
            "source": "synthetic",
            "version": 1,
            "seed": spec.seed,
            "num_samples": spec.num_samples,
            "cardinalities": list(spec.cardinalities),
            "exponents": list(spec.exponents),
            "hotness": list(spec.hotness),
            "locality": [spec.rho, spec.block_samples, spec.block_ids],
            "bias": spec.bias,
        }

    def read(self, samples: NDArray[np.int64]) -> Rows:
        """Compute the given samples."""
        self._check_samples(samples)
        made = self.generator.generate(samples)
        hotness = self.spec.hotness
        if max(hotness) == 1:
            return Rows(made.dense, made.ids, {}, made.label)
        starts = np.cumsum([0, *hotness])
        single = [int(starts[j]) for j, lookups in enumerate(hotness) if lookups == 1]
        jagged = {
            feature.name: Jagged(
                made.ids[:, starts[j] : starts[j + 1]].reshape(-1),
                np.full(samples.size, hotness[j], dtype=np.int64),
            )
            for j, feature in enumerate(self.features)
            if feature.is_jagged
        }
        return Rows(made.dense, np.ascontiguousarray(made.ids[:, single]), jagged, made.label)


class Subset(Dataset):
    """Samples [start, stop) of another data set, after an optional permutation of all of it."""

    def __init__(self, base: Dataset, start: int, stop: int, *, order: int | None = None) -> None:
        """Choose the samples.

        Args:
            base: The data set to read from.
            start: First position, inclusive.
            stop: Last position, exclusive.
            order: Key of the permutation of `base` that positions refer to; None keeps the order.
        """
        if not 0 <= start < stop <= base.num_samples:
            raise ValueError(f"samples [{start}, {stop}) of {base.num_samples} asked for")
        self.base, self.start = base, start
        self.num_samples = stop - start
        self.dense_names, self.features = base.dense_names, base.features
        self.has_labels, self.report = base.has_labels, base.report
        self.fingerprint = {**base.fingerprint, "subset": [start, stop, order]}
        self._order = None if order is None else Permutation(base.num_samples, order)

    def read(self, samples: NDArray[np.int64]) -> Rows:
        """Read the samples at the given positions of the subset."""
        return self.base.read(self.numbers(samples))

    def numbers(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the numbers that the samples at these positions have in the base."""
        self._check_samples(samples)
        position = samples + self.start
        return position if self._order is None else self._order(position)


def split_dataset(
    data: Dataset, eval_fraction: float, *, order: int | None = None
) -> tuple[Dataset, Dataset | None]:
    """Hold out the last part of the data for evaluation.

    Args:
        data: All samples.
        eval_fraction: Part to hold out, in [0, 1); 0 holds out nothing.
        order: Key of a permutation applied first, for a random split; None keeps the file's order.

    Returns:
        The training part and the held-out part (None if empty). Both are views.

    Raises:
        ValueError: The fraction is out of range, or leaves nothing to train on.
    """
    if not 0.0 <= eval_fraction < 1.0:
        raise ValueError(f"eval.fraction is {eval_fraction}, must be in [0, 1)")
    held_out = round(data.num_samples * eval_fraction)
    stop = data.num_samples - held_out
    if stop < 1:
        raise ValueError(
            f"eval.fraction {eval_fraction} of {data.num_samples} samples leaves none to train on"
        )
    if held_out == 0:
        return (data if order is None else Subset(data, 0, stop, order=order)), None
    return (
        Subset(data, 0, stop, order=order),
        Subset(data, stop, data.num_samples, order=order),
    )


def select(features: Sequence[Feature], fields: Sequence[str] | None) -> tuple[Feature, ...]:
    """Return the named features in the order named; all of them for None."""
    if fields is None:
        return tuple(features)
    by_name = {feature.name: feature for feature in features}
    missing = [name for name in fields if name not in by_name]
    if missing:
        raise ValueError(f"the data has no feature {missing}; it has {', '.join(by_name)}")
    return tuple(by_name[name] for name in fields)
