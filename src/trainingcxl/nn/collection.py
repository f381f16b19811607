"""EmbeddingBagCollection: several tables, one native lookup a batch (paper: embedding lookup in
CXL-MEM).

Shapes: B bags, F features, N lookups, D embedding dim.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np
import torch
from torch import Tensor, nn

from trainingcxl.nn.features import SparseFeatures
from trainingcxl.nn.lookup import pooled_lookup
from trainingcxl.nn.transfer import Transfer, transfer_for
from trainingcxl.optim import SGD, Adagrad, RowOptimizer, RowWiseAdagrad
from trainingcxl.pool import Pool, TableSpec
from trainingcxl.transaction import GroupInput

__all__ = ["EmbeddingBagCollection", "EmbeddingBagConfig"]

_POOLING = {"sum": 0, "mean": 1}  # csrc/kernels.h, Pooling


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbeddingBagConfig:
    """One table and the features that look rows up in it (names as in TorchRec)."""

    name: str
    num_embeddings: int
    embedding_dim: int
    feature_names: Sequence[str]
    pooling: Literal["sum", "mean"] = "sum"
    init_scale: float | None = None
    """Initial weights are uniform in [-init_scale, init_scale). Default: 1 /
    sqrt(num_embeddings).
    """
    padding_idx: int | None = None
    """Lookups of this row count for nothing, neither in sums nor in gradients."""

    def __post_init__(self) -> None:
        if self.pooling not in _POOLING:
            raise ValueError(
                f"table '{self.name}': pooling is '{self.pooling}', expected 'sum' or 'mean'"
            )
        for what in ("num_embeddings", "embedding_dim"):
            if getattr(self, what) < 1:
                raise ValueError(
                    f"table '{self.name}': {what} is {getattr(self, what)}, expected 1 or more"
                )
        if not self.feature_names or isinstance(self.feature_names, str):
            raise ValueError(
                f"table '{self.name}': feature_names must be a list of at least one name"
            )
        if self.padding_idx is not None and not 0 <= self.padding_idx < self.num_embeddings:
            raise ValueError(
                f"table '{self.name}': padding_idx is {self.padding_idx}, expected [0, "
                f"{self.num_embeddings})"
            )

    def table_spec(self, optimizer: RowOptimizer, seed: int) -> TableSpec:
        """What the pool has to hold for this table."""
        scale = self.num_embeddings**-0.5 if self.init_scale is None else self.init_scale
        return TableSpec(
            name=self.name,
            num_embeddings=self.num_embeddings,
            embedding_dim=self.embedding_dim,
            optimizer=optimizer.kind,
            init_scale=scale,
            init_seed=seed,
        )


class PooledModule(nn.Module):
    """What EmbeddingBag and EmbeddingBagCollection share: tables in a pool, one native group of
    features.
    """

    _anchor: Tensor

    def __init__(
        self,
        pool: Pool,
        tables: Sequence[EmbeddingBagConfig],
        optimizer: RowOptimizer | None,
        *,
        seed: int,
    ) -> None:
        super().__init__()
        if optimizer is None and pool.is_read_only:
            optimizer = _optimizer_of(pool, tables)
        if not isinstance(optimizer, RowOptimizer):
            raise TypeError(
                f"optimizer is a {type(optimizer).__name__}, expected one of trainingcxl.optim"
            )
        self.pool = pool
        self.optimizer = optimizer
        self.configs = list(tables)
        self.table_names = [table.name for table in tables]
        self.feature_names = [feature for table in tables for feature in table.feature_names]
        self.feature_dims = [table.embedding_dim for table in tables for _ in table.feature_names]
        for what, names in (("table", self.table_names), ("feature", self.feature_names)):
            if len(set(names)) < len(names):
                raise ValueError(f"a {what} name occurs twice in {names}")
        pool.create_tables([table.table_spec(optimizer, seed) for table in tables])
        pool.transaction.register(self)
        self.num_columns = sum(self.feature_dims)
        self._group = self._add_group()
        self._is_frozen = False
        self.transfer: Transfer | None = None
        # Moves with .to(device): pooled rows go where it is. Requires grad so that autograd calls
        # backward.
        self.register_buffer("_anchor", torch.zeros((), requires_grad=True), persistent=False)

    def _add_group(self) -> int:
        in_pool = self.pool.tables
        features = []
        column = 0
        for table in self.configs:
            for name in table.feature_names:
                padding = -1 if table.padding_idx is None else table.padding_idx
                features.append(
                    (name, in_pool[table.name].index, _POOLING[table.pooling], column, padding)
                )
                column += table.embedding_dim
        return self.pool.core.add_group(features, column)

    def group_input(self, features: Any) -> GroupInput:
        """`features` as the native engine takes them."""
        raise TypeError(f"{type(self).__name__} takes no features")

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Freezes the rows (False) or lets commits update them (True).

        Call it on this module: a parent's `requires_grad_` reaches parameters alone, and rows are
        none.
        """
        self._is_frozen = not requires_grad
        return super().requires_grad_(requires_grad)

    def _native_input(
        self, bags: int, values: Tensor, offsets: Tensor, weights: Tensor | None
    ) -> GroupInput:
        array = None if weights is None else _host_array(weights.detach())
        return self._group, bags, _host_array(values), _host_array(offsets), array

    def _pool(self, inputs: GroupInput, weights: Tensor | None) -> Tensor:
        anchor = self._anchor
        if not anchor.requires_grad:  # .to(device) makes a new buffer
            self._anchor = anchor = anchor.detach().requires_grad_()
        if self.transfer is None:
            self.transfer = transfer_for(anchor.device)
        return pooled_lookup(
            self.pool,
            self.transfer,
            anchor,
            inputs,
            weights,
            columns=self.num_columns,
            is_frozen=self._is_frozen,
        )

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        self.transfer = None  # the device may have changed
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call,no-any-return]


class EmbeddingBagCollection(PooledModule):
    """Pooled rows of several tables, which live in a pool and are updated there.

    Args:
        pool: The pool. Tables it lacks are created, tables it has must have the same shape.
        tables: Tables and their features. The output has their features in this order.
        optimizer: How a commit updates rows; see `trainingcxl.optim`. None is enough on a read-only
            pool.
        seed: Initial weights are a pure function of (seed, table name, row).

    Example:
        >>> import tempfile, torch, trainingcxl as tcxl
        >>> pool = tcxl.Pool(tempfile.mkdtemp() + "/ads.pool")
        >>> ebc = tcxl.EmbeddingBagCollection(
        ...     pool,
        ...     tables=[tcxl.EmbeddingBagConfig(name="user", num_embeddings=100, embedding_dim=8,
        feature_names=["user"])], ...     optimizer=tcxl.optim.RowWiseAdagrad(lr=0.02), ... )
        >>> ebc(torch.tensor([[3], [99]])).shape
        torch.Size([2, 8])
        >>> pool.close()
    """

    def __init__(
        self,
        pool: Pool,
        *,
        tables: Sequence[EmbeddingBagConfig],
        optimizer: RowOptimizer | None,
        seed: int = 0,
    ) -> None:
        super().__init__(pool, tables, optimizer, seed=seed)

    def group_input(self, features: Any) -> GroupInput:
        """`features` as the native engine takes them; no copy when keys are in this module's
        order.
        """
        sparse = SparseFeatures.from_any(features, self.feature_names).select(self.feature_names)
        return self._native_input(sparse.batch_size, sparse.values, sparse.offsets, sparse.weights)

    def forward(self, features: Any) -> Tensor:
        """Gathers and pools the rows of each bag.

        Args:
            features: SparseFeatures, an integer tensor (B, F) with one lookup per feature, a dict
                of tensors, or TorchRec's KeyedJaggedTensor.

        Returns:
            float32, shape (B, sum of dims), features in the order of `feature_names`. Empty bags
            give zeros.

        Raises:
            IndexError: An index is out of range; names table, feature, sample, position. The pool
                is unchanged.
            ValueError: Lengths or offsets do not fit.

        Blocks until the sums are done; releases the GIL. Changes nothing in the pool.
        """
        sparse = SparseFeatures.from_any(features, self.feature_names).select(self.feature_names)
        inputs = self._native_input(
            sparse.batch_size, sparse.values, sparse.offsets, sparse.weights
        )
        return self._pool(inputs, sparse.weights)

    def split(self, pooled: Tensor) -> dict[str, Tensor]:
        """Pooled rows by feature name: views (B, D) of a (B, sum of dims) tensor."""
        return dict(
            zip(self.feature_names, torch.split(pooled, self.feature_dims, dim=1), strict=True)
        )

    def extra_repr(self) -> str:
        """What print(model) shows."""
        rows = sum(config.num_embeddings for config in self.configs)
        kind, path = self.optimizer.kind, self.pool.path
        return f"{len(self.configs)} tables, {rows:,} rows, {kind}, pool '{path}'"


def _optimizer_of(pool: Pool, tables: Sequence[EmbeddingBagConfig]) -> RowOptimizer | None:
    """For evaluation: one of the kind that the pool's rows were trained with. It never updates
    anything.
    """
    kinds = {kind.kind: kind for kind in (SGD, Adagrad, RowWiseAdagrad)}
    for table in tables:
        if table.name in pool.tables:
            return kinds[pool.tables[table.name].optimizer](lr=0.0)
    return None


def _host_array(tensor: Tensor) -> "np.ndarray[Any, Any]":
    return tensor.detach().cpu().contiguous().numpy()
