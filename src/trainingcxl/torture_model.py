"""What torture trains: a small model whose bits show every mistake of recovery, and a life of it.

Updates are not idempotent (both Adagrads), batches share most of their rows, the dense part draws
random numbers (dropout) and has state (Adam): a row undone once too often or too rarely, a
generation of the wrong batch or a repeated batch each end in another digest.
"""

import hashlib
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from trainingcxl.checkpoint import FaultTolerantRun
from trainingcxl.nn import EmbeddingBagCollection, EmbeddingBagConfig, SparseFeatures
from trainingcxl.optim import Adagrad, RowOptimizer, RowWiseAdagrad
from trainingcxl.pool import Pool

__all__ = ["Life", "Scenario", "SmallBatch", "SmallBatches", "live", "open_scenario_pool"]

_BAGS = 64
_NARROW = {"user": (160, 16), "item": (37, 7), "bias": (1, 8)}  # rows, dim
_WIDE_ROWS, _WIDE_DIM, _WIDE_LOOKUPS = 4000, 64, 2600  # one such batch outgrows the smallest log
_MULTI_ROWS, _MULTI_DIM = 120, 24
_JOURNAL_BYTES = 1 << 19  # cut every few batches


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """A training to be killed."""

    name: str
    seed: int = 0
    epochs: int = 2
    batches_per_epoch: int = 24
    dense_every: int = 1
    resume: Literal["exact", "latest"] = "exact"
    threads: int = 2
    accumulate: int = 1
    """Batches a commit; divides batches_per_epoch."""
    skip_every: int = 0
    """Each so-manieth batch is skipped; 0: none."""
    wide_batch: int = -1
    """Batch of each epoch that outgrows the log; negative: none, and no table for it."""
    has_dense: bool = True
    undo_log: Literal["background", "fused", "alternating"] = "background"
    """Named, as "auto" would choose by time; alternating: another form every few batches."""
    lookup: Literal["strict", "relaxed"] = "strict"
    """Where level and medium have the choice."""
    medium: Literal["auto", "fsdax", "block"] = "auto"

    has_power_cuts: bool = False
    """A kill counts as a power failure: see torture_power."""
    assumes_reboot: bool = False

    @property
    def num_consumed(self) -> int:
        """Batches in all epochs."""
        return self.epochs * self.batches_per_epoch


@dataclass(slots=True)
class SmallBatch:
    """Dense features (B, 4), labels (B,), and features for both collections."""

    dense: Tensor
    label: Tensor
    narrow: SparseFeatures
    multi: SparseFeatures


class SmallBatches:
    """A loader whose batches are a pure function of (seed, epoch, batch)."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._epoch = self._batch = 0

    def __len__(self) -> int:
        return self._scenario.batches_per_epoch

    def seek(self, epoch: int, batch: int) -> None:
        """The next iteration starts there."""
        self._epoch, self._batch = epoch, batch

    def __iter__(self) -> Iterator[SmallBatch]:
        for batch in range(self._batch, len(self)):
            yield self.make(self._epoch, batch)

    def make(self, epoch: int, batch: int) -> SmallBatch:
        """Computes one batch."""
        rng = np.random.default_rng([self._scenario.seed, epoch, batch])
        keys, values, lengths = list(_NARROW), [], []
        for rows, _ in _NARROW.values():
            values.append(_skewed(rng, rows, 3 * _BAGS))
            lengths.append(np.full(_BAGS, 3))
        if self._scenario.wide_batch >= 0:
            keys.append("wide")
            count = _WIDE_LOOKUPS if batch == self._scenario.wide_batch else 30
            values.append(rng.permutation(_WIDE_ROWS)[:count])
            lengths.append(
                np.diff(np.sort(rng.integers(0, count, _BAGS - 1)), prepend=0, append=count)
            )
        multi_lengths = rng.integers(0, 6, _BAGS)
        return SmallBatch(
            torch.from_numpy(rng.standard_normal((_BAGS, 4), dtype=np.float32)),
            torch.from_numpy((rng.random(_BAGS) < 0.3).astype(np.float32)),
            SparseFeatures(
                keys, _tensor(np.concatenate(values)), lengths=_tensor(np.concatenate(lengths))
            ),
            SparseFeatures(
                ["multi"],
                _tensor(_skewed(rng, _MULTI_ROWS, int(multi_lengths.sum()))),
                lengths=_tensor(multi_lengths),
            ),
        )


def _skewed(rng: np.random.Generator, rows: int, count: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Ids of which most come again in the next batch."""
    return (rows * rng.random(count) ** 4).astype(np.int64)


def _tensor(array: np.ndarray[Any, Any]) -> Tensor:
    return torch.from_numpy(array.astype(np.int64))


class _SmallModel(nn.Module):
    def __init__(self, pool: Pool, scenario: Scenario) -> None:
        super().__init__()
        torch.manual_seed(scenario.seed)
        shapes = dict(_NARROW)
        if scenario.wide_batch >= 0:
            shapes["wide"] = (_WIDE_ROWS, _WIDE_DIM)
        self.row_optimizers: list[RowOptimizer] = [Adagrad(lr=0.05), RowWiseAdagrad(lr=0.05)]
        self.narrow = EmbeddingBagCollection(
            pool,
            tables=[_table(name, *shape) for name, shape in shapes.items()],
            optimizer=self.row_optimizers[0],
        )
        self.multi = EmbeddingBagCollection(
            pool,
            tables=[_table("multi", _MULTI_ROWS, _MULTI_DIM, "mean")],
            optimizer=self.row_optimizers[1],
        )
        self.top: nn.Sequential | None = None
        if scenario.has_dense:
            columns = 4 + self.narrow.num_columns + self.multi.num_columns
            self.top = nn.Sequential(
                nn.Linear(columns, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1)
            )

    def loss(self, batch: SmallBatch) -> Tensor:
        pooled = torch.cat([self.narrow(batch.narrow), self.multi(batch.multi)], dim=1)
        if self.top is None:
            return (pooled - batch.dense[:, :1]).square().sum()
        logits = self.top(torch.cat([batch.dense, pooled], dim=1)).squeeze(1)
        return nn.functional.binary_cross_entropy_with_logits(logits, batch.label, reduction="sum")


def _table(
    name: str, rows: int, dim: int, pooling: Literal["sum", "mean"] = "sum"
) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(
        name=name,
        num_embeddings=rows,
        embedding_dim=dim,
        feature_names=[name],
        pooling=pooling,
        init_scale=0.1,
    )


class _Rate:
    """A learning-rate schedule with a state: halves every 20 commits."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers
        self.commits = 0

    def advance(self) -> None:
        self.commits += 1
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] *= 0.5 if self.commits % 20 == 0 else 1.0

    def state_dict(self) -> dict[str, int]:
        return {"commits": self.commits}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.commits = state["commits"]


def open_scenario_pool(path: str, scenario: Scenario) -> Pool:
    """Opens or creates the scenario's pool."""
    options: dict[str, Any] = {}
    if scenario.medium != "auto":
        options = {"durability": "power", "_medium": scenario.medium}
    if scenario.has_power_cuts:
        options |= {"journal_bytes": _JOURNAL_BYTES, "_assume_reboot": scenario.assumes_reboot}
    if scenario.medium != "block":
        options["lookup"] = scenario.lookup
    if scenario.undo_log != "alternating":
        options["undo_log"] = scenario.undo_log
    return Pool(path, resume=scenario.resume, threads=scenario.threads, **options)


@dataclass(slots=True)
class Life:
    """What one life of the training can be looked at by: all of it, standing at a commit."""

    pool: Pool
    run: FaultTolerantRun
    model: _SmallModel
    dense_optimizer: torch.optim.Optimizer | None
    rate: _Rate
    scenario: Scenario
    pending: int = 0
    """Batches whose gradients wait for a commit."""

    @property
    def consumed(self) -> int:
        """Batches consumed since the start."""
        return self.run.epoch * self.scenario.batches_per_epoch + self.run.batch

    def tables_digest(self) -> str:
        """Over weights and state of all rows."""
        digest = hashlib.blake2b(digest_size=16)
        for name, table in sorted(self.pool.tables.items()):
            digest.update(name.encode())
            digest.update(table.weight.tobytes())
            digest.update(table.state.tobytes())
        return digest.hexdigest()

    def rest_digest(self) -> str:
        """Over the dense part, its optimizer, schedule, random generator and position."""
        digest = hashlib.blake2b(digest_size=16)
        for name, tensor in self.model.state_dict().items():
            digest.update(name.encode() + tensor.numpy().tobytes())
        if self.dense_optimizer is not None:
            for key, state in sorted(self.dense_optimizer.state_dict()["state"].items()):
                for name, value in sorted(state.items()):
                    digest.update(f"{key} {name}".encode() + value.numpy().tobytes())
        rates = [optimizer.param_groups[0]["lr"] for optimizer in self.model.row_optimizers]
        digest.update(f"{rates} {self.rate.commits} {self.consumed}".encode())
        digest.update(torch.get_rng_state().numpy().tobytes())
        return digest.hexdigest()


def live(path: str, scenario: Scenario, watch: Callable[[str, Life], None]) -> None:
    """Opens the pool and trains to the end.

    `watch` is called at the "start", after each "commit", and at the "end"; it may raise: the
    pool is closed then as well.
    """
    torch.set_num_threads(1)
    random.seed(scenario.seed)  # a fork draws new seeds; those of torch are set with the model
    np.random.seed(scenario.seed)
    with open_scenario_pool(path, scenario) as pool:
        model = _SmallModel(pool, scenario)
        dense = torch.optim.Adam(model.top.parameters(), lr=0.01) if model.top is not None else None
        rate = _Rate([*model.row_optimizers, *([dense] if dense is not None else [])])
        run = FaultTolerantRun(
            pool,
            model,
            dense,
            state={"rate": rate},
            dense_every=scenario.dense_every,
            sparse_of=lambda batch: {model.narrow: batch.narrow, model.multi: batch.multi},
        )
        life = Life(pool, run, model, dense, rate, scenario)
        watch("start", life)
        for _ in run.epochs(scenario.epochs):
            for batch in run.batches(SmallBatches(scenario)):
                if _learn(life, batch):
                    watch("commit", life)
        watch("end", life)


def _learn(life: Life, batch: SmallBatch) -> bool:
    """Consumes one batch; whether it ended in a commit."""
    scenario, run = life.scenario, life.run
    number = life.consumed + 1
    loss = life.model.loss(batch)
    if scenario.accumulate > 1:
        loss.backward()  # type: ignore[no-untyped-call]
        life.pending = (life.pending + 1) % scenario.accumulate
        if life.pending:
            return False
        life.rate.advance()
        run.commit()
        life.model.zero_grad()
        return True
    life.rate.advance()
    if scenario.undo_log == "alternating" and number % 3 == 0:
        life.pool.core.set_undo_log("fused" if number % 2 else "background")
    if scenario.skip_every and number % scenario.skip_every == 0:
        run.skip()
    else:
        run.step(loss)
    return True
