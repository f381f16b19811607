"""What one step has gathered so far: lookups whose gradients arrived, and the row optimizers
that will apply them.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from trainingcxl.errors import PoolError

__all__ = ["GroupInput", "RowOptimizerLike", "Transaction"]

FloatArray = npt.NDArray[np.float32]
# group, bags, values, offsets (F * B + 1, feature-major), per-sample weights
GroupInput = tuple[int, int, npt.NDArray[Any], npt.NDArray[Any], FloatArray | None]


class RowOptimizerLike(Protocol):
    """Hands out the settings of the next row update (trainingcxl.optim)."""

    def row_settings(self) -> tuple[float, float]:
        """Learning rate and eps."""
        ...

    def step(self) -> None:
        """Counts a commit."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Param groups, as torch optimizers have them."""
        ...


class Collection(Protocol):
    """A module whose rows live in the pool (trainingcxl.nn)."""

    table_names: list[str]

    @property
    def optimizer(self) -> RowOptimizerLike:
        """The row optimizer of its tables."""
        ...

    def group_input(self, features: Any) -> GroupInput:
        """The features as the native engine takes them."""
        ...


@dataclass(slots=True)
class _Part:
    lookup: Any
    grad: FloatArray


class Transaction:
    """The open step of a pool. Nothing here changes the pool; committing is the run's business."""

    def __init__(self) -> None:
        self.collections: list[Collection] = []
        self.parts: list[_Part] = []
        self.has_forward = False  # a training forward ran since the last commit
        self.has_run = False  # a FaultTolerantRun commits here

    def register(self, collection: Collection) -> None:
        """Adds a module; a table belongs to one module only.

        Raises:
            PoolError: Another module already uses one of its tables.
        """
        for other in self.collections:
            for name in set(other.table_names) & set(collection.table_names):
                raise PoolError(
                    f"table '{name}' is already used by another module on this pool\n"
                    "  do:    list all features of a table in one EmbeddingBagConfig"
                )
        self.collections.append(collection)

    def group_inputs(self, features: Any) -> list[GroupInput]:
        """The features of a batch, of one module or by module, as the engine takes them.

        Raises:
            IndexError, ValueError, TypeError, KeyError: They do not fit the modules.
        """
        if len(self.collections) == 1:
            return [self.collections[0].group_input(features)]
        return [
            module.group_input(features[module])
            for module in self.collections
            if module in features
        ]

    def add_gradient(self, lookup: Any, grad: FloatArray) -> None:
        """Called in backward: `grad` (B, sum of dims) belongs to `lookup`."""
        self.parts.append(_Part(lookup, grad))

    def native_parts(self) -> list[tuple[Any, FloatArray]]:
        """Lookups and gradients in the order in which the gradients arrived."""
        return [(part.lookup, part.grad) for part in self.parts]

    def clear(self) -> None:
        """Forgets everything since the last commit."""
        self.parts.clear()
        self.has_forward = False

    def row_settings(self, table_names: list[str]) -> list[tuple[float, float]]:
        """Learning rate and eps for each table of the pool, in its order."""
        by_name = {}
        for collection in self.collections:
            for name in collection.table_names:
                by_name[name] = collection.optimizer.row_settings()
        return [by_name.get(name, (0.0, 1.0)) for name in table_names]
