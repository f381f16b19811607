"""Rows and batches of the power-failure rig, and a trainer of them in NumPy that shares no code
with the package: what a recovered pool is compared with.

As in numpy_trainer.py the gradient of a pooled row is (pooled - target): it depends on the rows, so
a wrong row spreads.
"""

from dataclasses import dataclass

import numpy as np

__all__ = ["EPS", "LR", "Batch", "RowTrainer", "Rows", "TableShape", "make_batch"]

LR, EPS = 0.05, 1e-8
Rows = dict[str, tuple[bytes, bytes]]
"""Weights and optimizer state of each table."""


@dataclass(frozen=True)
class TableShape:
    name: str
    rows: int
    dim: int
    optimizer: str


@dataclass(frozen=True)
class Batch:
    ids: dict[str, np.ndarray]
    """Per table (bags, lookups) int64."""
    target: np.ndarray
    """(bags, sum of dims) float32."""


def make_batch(
    shapes: list[TableShape], bags: int, lookups: int, history: int, number: int
) -> Batch:
    """Batch `number` of a history: another history has other data from some batch on."""
    rng = np.random.default_rng([11, history, number])
    ids = {
        shape.name: (shape.rows * rng.random((bags, lookups)) ** 3).astype(np.int64)
        for shape in shapes
    }
    columns = sum(shape.dim for shape in shapes)
    return Batch(ids, rng.standard_normal((bags, columns), dtype=np.float32))


class RowTrainer:
    """Weights (R, D) and states, float32; every sum in the order that docs/design.md fixes."""

    def __init__(self, shapes: list[TableShape], weights: dict[str, np.ndarray]) -> None:
        self.shapes = shapes
        self.weight = {name: weight.copy() for name, weight in weights.items()}
        widths = {"sgd": 0, "rowwise-adagrad": 1}
        self.state = {
            s.name: np.zeros((s.rows, widths.get(s.optimizer, s.dim)), np.float32) for s in shapes
        }

        self.before: dict[str, np.ndarray] = {}
        """Relaxed lookups: weights before the newest batch, and which rows that changed."""
        self.changed: dict[str, np.ndarray] = {}

    def step(self, batch: Batch, *, relaxed: bool = False) -> None:
        column = 0
        before = {name: weight.copy() for name, weight in self.weight.items()} if relaxed else {}
        for shape in self.shapes:
            ids, weight = batch.ids[shape.name], self.weight[shape.name]
            pooled = self._pool(shape.name, ids)
            grad = pooled - batch.target[:, column : column + shape.dim]
            column += shape.dim
            bags = np.repeat(np.arange(len(ids)), ids.shape[1])
            for row in np.unique(ids):
                g = _sum(grad[bags[ids.reshape(-1) == row]])
                weight[row] -= self._change(shape, row, g)
        self.before = before
        self.changed = {name: np.unique(ids) for name, ids in batch.ids.items() if relaxed}

    def _pool(self, name: str, ids: np.ndarray) -> np.ndarray:
        """Sums of bags; relaxed where something is known of the batch before."""
        weight = self.weight[name]
        before = self.before.get(name, weight)
        pooled = np.zeros((len(ids), weight.shape[1]), np.float32)
        for k in range(ids.shape[1]):
            pooled += before[ids[:, k]]
        for row in self.changed.get(name, ()):
            for bag in np.nonzero(ids == row)[0]:
                pooled[bag] += weight[row] - before[row]
        return pooled

    def _change(self, shape: TableShape, row: int, g: np.ndarray) -> np.ndarray:
        if shape.optimizer == "sgd":
            return np.float32(LR) * g
        state = self.state[shape.name]
        if shape.optimizer == "adagrad":
            state[row] += g * g
            return np.float32(LR) * g / (np.sqrt(state[row]) + np.float32(EPS))
        state[row] += _mean_square(g)
        return np.float32(LR) / (np.sqrt(state[row]) + np.float32(EPS)) * g

    def rows(self) -> Rows:
        return {n: (self.weight[n].tobytes(), self.state[n].tobytes()) for n in self.weight}

    def restore(self, rows: Rows, before: Rows | None = None, batch: Batch | None = None) -> None:
        """Takes the rows; relaxed: and those before the batch that led to them."""
        self.changed = {} if batch is None else {n: np.unique(i) for n, i in batch.ids.items()}
        self.before = {
            shape.name: np.frombuffer(before[shape.name][0], np.float32).reshape(shape.rows, -1)
            for shape in self.shapes
            if before is not None
        }
        for shape in self.shapes:
            weight, state = rows[shape.name]
            name = shape.name
            self.weight[name] = np.frombuffer(weight, np.float32).reshape(shape.rows, -1).copy()
            if state:
                self.state[name] = np.frombuffer(state, np.float32).reshape(shape.rows, -1).copy()


def _sum(grads: np.ndarray) -> np.ndarray:
    """Sums of 1024 lookups each, added in order."""
    parts = []
    for begin in range(0, len(grads), 1024):
        total = np.zeros(grads.shape[1], np.float32)
        for grad in grads[begin : begin + 1024]:
            total += grad
        parts.append(total)
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _mean_square(g: np.ndarray) -> np.float32:
    lanes = np.zeros(16, np.float32)
    for k, value in enumerate(g):
        lanes[k % 16] += value * value
    for half in (8, 4, 2, 1):
        lanes[:half] += lanes[half : 2 * half]
    return np.float32(lanes[0]) / np.float32(len(g))
