"""Trainings as hypothesis invents them: any order of steps, skips, kills, reopenings, snapshots.

Rows are compared with a NumPy model that shares nothing with the engine. Gradients are whole
numbers and the learning rate is a power of two, so every order of summation gives the same bits. A
kill is a copy of the pool's files at that moment: what a process leaves that dies there.
"""

import gc
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

import trainingcxl as tcxl
from trainingcxl.pool import Pool, verify

ROWS, DIM, BAGS = 40, 4, 5
LEARNING_RATE = 0.5
BATCHES = 10_000  # of the one epoch: never reached
EXAMPLES = int(os.environ.get("TRAININGCXL_STATEFUL_EXAMPLES", "25"))


class Loader:
    """Batches as a pure function of their number; some are much larger than the others."""

    def __init__(self) -> None:
        self._next = 0

    def __len__(self) -> int:
        return BATCHES

    def seek(self, epoch: int, batch: int) -> None:
        """Go on there."""
        assert epoch == 0
        self._next = batch

    def __iter__(self) -> Any:
        return (make(number) for number in range(self._next, BATCHES))


def make(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids (bags, lookups) and the gradient of each bag, whole numbers (bags, DIM)."""
    rng = np.random.default_rng(number)
    lookups = 60 if number % 9 == 4 else 3
    ids = (ROWS * rng.random((BAGS, lookups)) ** 2).astype(np.int64)
    return torch.from_numpy(ids), torch.from_numpy(rng.integers(-3, 4, (BAGS, DIM))).float()


def updated(rows: np.ndarray, number: int) -> np.ndarray:
    """The model of one batch."""
    ids, grads = (tensor.numpy() for tensor in make(number))
    rows = rows.copy()
    for bag in range(BAGS):
        for row in ids[bag]:
            rows[row] -= np.float32(LEARNING_RATE) * grads[bag]
    return rows


class Training(RuleBasedStateMachine):
    """One pool after the other, each a copy of what the one before left."""

    closed = 0

    def __init__(self) -> None:
        super().__init__()
        shm = Path("/dev/shm")
        self.folder = Path(tempfile.mkdtemp(dir=shm if shm.is_dir() else None))
        self.pools = 0
        self.pool: Any = None
        self.run: Any = None
        self.bags: Any = None
        self.batches: Any = None
        self.batch: Any = None

    @initialize(
        dense_every=st.sampled_from([1, 2, 3]),
        undo_log=st.sampled_from(["background", "fused", "auto"]),
        check_rows=st.booleans(),
        is_power=st.booleans(),
    )
    def begin(self, dense_every: int, undo_log: str, check_rows: bool, is_power: bool) -> None:
        """A new pool."""
        self.dense_every = dense_every
        self.options = {"undo_log": undo_log, "check_rows": check_rows, "threads": 1}
        if is_power:  # the code path of persistent memory
            self.options |= {"durability": "power", "_medium": "fsdax"}
        self._open(self.folder / "0.pool")
        self.states = [self.pool.tables["t"].weight.copy()]
        self.dense = [self._counted()]

    def _open(self, path: Path, resume: str = "exact") -> None:
        self.path = path
        self.pool = Pool(path, resume=resume, **self.options)
        config = tcxl.EmbeddingBagConfig(
            name="t", num_embeddings=ROWS, embedding_dim=DIM, feature_names=["f"], init_scale=0.0
        )
        self.bags = tcxl.EmbeddingBagCollection(
            self.pool, tables=[config], optimizer=tcxl.optim.SGD(lr=LEARNING_RATE)
        )
        self.head = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(self.head.weight)
        model = torch.nn.ModuleList([self.bags, self.head])
        self.run = tcxl.FaultTolerantRun(
            self.pool,
            model,
            torch.optim.SGD(self.head.parameters(), lr=1.0),
            dense_every=self.dense_every,
            sparse_of=lambda batch: tcxl.SparseFeatures(
                ["f"], batch[0].flatten(), lengths=torch.full((BAGS,), batch[0].shape[1])
            ),
        )
        self.batches = iter(self.run.batches(Loader()))

    def _fetch(self) -> None:
        if self.batch is None:
            self.batch = next(self.batches)

    def _loss(self) -> torch.Tensor:
        ids, grads = self.batch
        lengths = torch.full((BAGS,), ids.shape[1])
        pooled = self.bags(tcxl.SparseFeatures(["f"], ids.flatten(), lengths=lengths))
        # The dense weight counts the batches that were stepped.
        return (pooled * grads).sum() - self.head(torch.ones(1, 1)).sum()

    def _counted(self) -> float:
        return self.head.weight.detach().item()

    def _check(self) -> None:
        number = self.run.committed_batch
        assert (self.pool.tables["t"].weight == self.states[number]).all()

    # --- rules

    @rule()
    def fetch(self) -> None:
        """The next batch is in hand, the one after it announced; nothing has changed."""
        self._fetch()
        self._check()

    @rule()
    def forward(self) -> None:
        """Up to the backward of a step that nobody commits yet."""
        self._fetch()
        self._loss()
        self._check()

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        """Batches are committed."""
        for _ in range(count):
            self._fetch()
            self.run.step(self._loss())
            self.batch = None
            number = len(self.states)
            self.states.append(updated(self.states[-1], number - 1))
            self.dense.append(self.dense[-1] + 1)
            assert self.run.committed_batch == number
        self._check()

    @rule()
    def skip(self) -> None:
        """A batch is left out: its number counts, its rows stay."""
        self._fetch()
        self.run.skip()
        self.batch = None
        self.states.append(self.states[-1])
        self.dense.append(self.dense[-1])
        self._check()

    @rule(resume=st.sampled_from(["exact", "exact", "latest"]), twice=st.booleans())
    def kill(self, resume: str, twice: bool) -> None:
        """The process dies here; twice: the next one dies as soon as it has recovered."""
        for _ in range(1 + twice):
            self.pools += 1
            copy = self.folder / f"{self.pools}.pool"
            shutil.copytree(self.path, copy)
            committed = self.run.committed_batch
            self._abandon()
            assert verify(copy) == []
            self._open(copy, resume)
            self._recovered(committed, resume)

    def _abandon(self) -> None:
        self.batches.close()
        self.pool.core.close(False)
        self._let_go()
        shutil.rmtree(self.path)

    def _let_go(self) -> None:
        """A closed pool stays mapped as long as something knows it."""
        self.batch = self.batches = self.run = self.bags = self.pool = None
        Training.closed += 1
        if Training.closed % 16 == 0:  # it takes long, with torch around
            gc.collect()

    def _recovered(self, committed: int, resume: str) -> None:
        report = self.pool.recovery
        assert report is not None
        found = self.run.committed_batch
        assert report.committed_batch == committed
        assert committed - (2 * self.dense_every - 1) <= found <= committed
        assert found == committed or resume == "exact"
        self._check()
        dense = self._counted()
        del self.states[found + 1 :], self.dense[found + 1 :]
        if resume == "exact":
            assert dense == self.dense[found]
        else:  # an older dense part goes on with the newest rows
            assert dense in self.dense
            self.dense[found] = dense

    @rule()
    def reopen(self) -> None:
        """An orderly end between two steps loses nothing; in a step it leaves the dense part."""
        number = self.run.committed_batch
        is_mid_step = self.pool.transaction.has_forward
        self.batches.close()
        self.pool.close()
        self._let_go()
        assert verify(self.path) == []
        self._open(self.path)
        assert is_mid_step or self.run.committed_batch == number
        self._recovered(number, "exact")

    @rule()
    def sync(self) -> None:
        """All is written."""
        if self.batch is None:
            self.run.sync()
        self._check()

    @precondition(lambda self: self.batch is None)
    @rule()
    def snapshot(self) -> None:
        """A copy has the batch's rows, and is a pool."""
        copy = self.folder / "snapshot"
        self.pool.snapshot(copy)
        assert verify(copy) == []
        with Pool(copy, read_only=True) as pool:
            assert pool.committed_batch == self.run.committed_batch
            assert (pool.tables["t"].weight == self.states[pool.committed_batch]).all()
        shutil.rmtree(copy)

    def teardown(self) -> None:
        """Nothing is left behind."""
        if self.pool is not None:
            self._abandon()
        shutil.rmtree(self.folder)


def test_any_order_of_events() -> None:
    """Prints a line that tells how much was tried."""
    run_state_machine_as_test(
        Training,
        settings=settings(max_examples=EXAMPLES, stateful_step_count=25, deadline=None),
    )
    print(json.dumps({"rig": "stateful", "examples": EXAMPLES, "failures": 0}))
