"""Tables of a pool: what is asked for, and what is there."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from trainingcxl import _core
from trainingcxl.errors import PoolError

__all__ = ["OPTIMIZERS", "OptimizerKind", "Table", "TableSpec"]

_NAME_BYTES_MAX = 127  # docs/format.md

OptimizerKind = Literal["sgd", "adagrad", "rowwise-adagrad"]

OPTIMIZERS: tuple[OptimizerKind, ...] = (
    "sgd",
    "adagrad",
    "rowwise-adagrad",
)  # order: csrc/kernels.h


@dataclass(frozen=True, kw_only=True, slots=True)
class TableSpec:
    """A table to be created, or to be found with the same shape."""

    name: str
    num_embeddings: int
    embedding_dim: int
    optimizer: OptimizerKind
    init_scale: float
    init_seed: int

    def __post_init__(self) -> None:
        """Refuses a name that the format has no room for."""
        if not 1 <= len(self.name.encode()) <= _NAME_BYTES_MAX:
            shown = self.name if len(self.name) <= 40 else f"{self.name[:40]}..."
            raise ValueError(f"table name '{shown}' must have 1 to {_NAME_BYTES_MAX} bytes")


class Table:
    """One embedding table of an open pool: weights float32 (R, D), optimizer state float32 (R,
    S).
    """

    def __init__(self, core: "_core.Pool", index: int, record: Mapping[str, Any]) -> None:
        self._core = core
        self.index = index
        self.name: str = record["name"]
        self.num_embeddings: int = record["num_embeddings"]
        self.embedding_dim: int = record["embedding_dim"]
        self.state_dim: int = record["state_dim"]
        self.optimizer: OptimizerKind = OPTIMIZERS[record["optimizer"]]
        self.init_seed: int = record["init_seed"]
        self.init_scale: float = record["init_scale"]
        self.has_check: bool = record["has_check"]
        self.num_bytes: int = record["weight_bytes"] + record["state_bytes"]

    @property
    def weight(self) -> npt.NDArray[np.float32]:
        """View of the weights, shape (R, D). Read-only: rows change in commits alone."""
        return _read_only(self._core.weight(self.index))

    @property
    def state(self) -> npt.NDArray[np.float32]:
        """View of the optimizer state, shape (R, S); S is 0, 1 or D. Read-only."""
        return _read_only(self._core.state(self.index)[:, : self.state_dim])


def check_same_shape(path: Path, spec: TableSpec, have: Table) -> None:
    for name in ("num_embeddings", "embedding_dim", "optimizer"):
        wanted, found = getattr(spec, name), getattr(have, name)
        if wanted != found:
            raise PoolError(
                f"table '{spec.name}' of pool '{path}' has {name} {found}, {wanted} was asked for\n"
                f"  do:    ask for {found}, or use another pool"
            )


def _read_only(array: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    array.flags.writeable = False
    return array
