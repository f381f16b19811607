"""Trainings as hypothesis invents them: any order of steps, skips, kills, power failures, kills and
power failures in a recovery, rewinds, growths, reopenings, snapshots.

Rows are compared with a NumPy model that shares nothing with the engine. Gradients are whole
numbers and the learning rate is a power of two, so every order of summation gives the same bits. At
level process a kill is a copy of the pool's files at that moment: what a process leaves that dies
there. At level power every life is recorded (power_lives.py), and both kinds of crash leave what
the record says they may.
"""

import gc
import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from power_lives import Lives

import trainingcxl as tcxl
from trainingcxl.pool import Pool, verify

BAGS = 5
SHAPES = {"t": (40, 4), "w": (2800, 64)}  # a batch with all rows of the second outgrows the log
USUAL_ROWS = {"t": 40, "w": 9}
LEARNING_RATE = 0.5
BATCHES = 10_000  # of the one epoch: never reached
RESUME = st.sampled_from(["exact", "exact", "latest"])
EXAMPLES = int(os.environ.get("TRAININGCXL_STATEFUL_EXAMPLES", "25"))


class Loader:
    """Batches as a pure function of their number; some are much larger than the others."""

    def __init__(self, tables: tuple[str, ...], wide: set[int]) -> None:
        self._tables, self._wide = tables, wide
        self._next = 0

    def __len__(self) -> int:
        return BATCHES

    def seek(self, epoch: int, batch: int) -> None:
        """Go on there."""
        assert epoch == 0
        self._next = batch

    def __iter__(self) -> Any:
        return (make(number, self._tables, self._wide) for number in range(self._next, BATCHES))


@dataclass(frozen=True)
class Batch:
    """Per table ids (BAGS, lookups), and the gradient of each bag, whole numbers (BAGS, dim)."""

    ids: dict[str, np.ndarray]
    grads: dict[str, np.ndarray]

    def features(self) -> tcxl.SparseFeatures:
        """For the collection."""
        values = np.concatenate([ids.ravel() for ids in self.ids.values()])
        lengths = np.concatenate([np.full(BAGS, ids.shape[1]) for ids in self.ids.values()])
        return tcxl.SparseFeatures(
            list(self.ids), torch.from_numpy(values), lengths=torch.from_numpy(lengths)
        )


def make(number: int, tables: tuple[str, ...], wide: set[int]) -> Batch:
    """One batch."""
    rng = np.random.default_rng(number)
    ids, grads = {}, {}
    for name in tables:
        rows, dim = SHAPES[name]
        lookups = 60 if number % 9 == 4 else 3
        ids[name] = (USUAL_ROWS[name] * rng.random((BAGS, lookups)) ** 2).astype(np.int64)
        if name == "w" and number in wide:
            ids[name] = rng.permutation(rows).reshape(BAGS, -1)
        grads[name] = rng.integers(-3, 4, (BAGS, dim)).astype(np.float32)
    return Batch(ids, grads)


Tables = dict[str, np.ndarray]


def updated(tables: Tables, batch: Batch) -> Tables:
    """The model of one batch."""
    out = {}
    for name, rows in tables.items():
        out[name] = rows.copy()
        change = np.float32(LEARNING_RATE) * batch.grads[name]
        np.subtract.at(out[name], batch.ids[name], change[:, None, :])
    return out


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
        medium=st.sampled_from(["process", "fsdax", "block"]),
        can_grow=st.booleans(),
        seed=st.integers(0, 2**32 - 1),
    )
    def begin(
        self,
        dense_every: int,
        undo_log: str,
        check_rows: bool,
        medium: str,
        can_grow: bool,
        seed: int,
    ) -> None:
        """A new pool."""
        self.dense_every, self.medium = dense_every, medium
        self.names = ("t", "w") if can_grow else ("t",)
        self.wide: set[int] = set()
        self.options = {"undo_log": undo_log, "check_rows": check_rows, "threads": 1}
        self.lives = None
        if medium != "process":
            self.options |= {"durability": "power", "_medium": medium}
            self.lives = Lives(is_block=medium == "block", seed=seed)
        if medium == "block":
            self.options |= {"journal_bytes": 1 << 19, "lag_max": 4}
        self._open(self.folder / "0" / "pool")
        self.states: list[Tables] = [self._rows()]
        self.dense = [self._counted()]

    def _open(self, path: Path, resume: str = "exact", *, is_restart: bool = False) -> None:
        self.path = path
        path.parent.mkdir(exist_ok=True)
        options = {**self.options, "_assume_reboot": True} if is_restart else self.options
        if self.lives is not None:
            self.lives.begin(path)
        self.pool = Pool(path, resume=resume, **options)
        configs = [
            tcxl.EmbeddingBagConfig(
                name=name, num_embeddings=SHAPES[name][0], embedding_dim=SHAPES[name][1],
                feature_names=[name], init_scale=0.0,
            )
            for name in self.names
        ]  # fmt: skip
        self.bags = tcxl.EmbeddingBagCollection(
            self.pool, tables=configs, optimizer=tcxl.optim.SGD(lr=LEARNING_RATE)
        )
        self.head = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(self.head.weight)
        model = torch.nn.ModuleList([self.bags, self.head])
        self.run = tcxl.FaultTolerantRun(
            self.pool,
            model,
            torch.optim.SGD(self.head.parameters(), lr=1.0),
            dense_every=self.dense_every,
            sparse_of=Batch.features,
        )
        self.batches = iter(self.run.batches(Loader(self.names, self.wide)))

    def _rows(self) -> Tables:
        return {name: self.pool.tables[name].weight.copy() for name in self.names}

    def _fetch(self) -> None:
        if self.batch is None:
            self.batch = next(self.batches)

    def _loss(self) -> torch.Tensor:
        grads = np.concatenate(list(self.batch.grads.values()), axis=1)
        pooled = self.bags(self.batch.features())
        # The dense weight counts the batches that were stepped.
        return (pooled * torch.from_numpy(grads)).sum() - self.head(torch.ones(1, 1)).sum()

    def _counted(self) -> float:
        return self.head.weight.detach().item()

    def _check(self) -> None:
        self._compare(self.pool)

    def _compare(self, pool: Any) -> None:
        state = self.states[pool.committed_batch]
        for name in self.names:
            assert (pool.tables[name].weight == state[name]).all()

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
            batch = self.batch
            self.run.step(self._loss())
            self.batch = None
            number = len(self.states)
            self.states.append(updated(self.states[-1], batch))
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

    @precondition(lambda self: "w" in self.names)
    @rule(ahead=st.integers(2, 4))
    def grow(self, ahead: int) -> None:
        """One of the next batches outgrows the log."""
        self.wide.add(len(self.states) + ahead)

    @rule(resume=RESUME, twice=st.booleans())
    def kill(self, resume: str, twice: bool) -> None:
        """The process dies here; twice: the next one dies as soon as it has recovered."""
        for _ in range(1 + twice):
            committed = self.run.committed_batch
            self._die()
            if self.medium != "block":
                assert verify(self.path) == []
            self._open(self.path, resume)
            self._recovered(committed, committed, resume)

    @precondition(lambda self: self.medium != "process")
    @rule(resume=RESUME)
    def lose_power(self, resume: str) -> None:
        """What was durable is there; of the rest, anything."""
        committed, durable = self.run.committed_batch, self.pool.durable_batch
        self._die(is_cut=True)
        self._open(self.path, resume, is_restart=True)
        self._recovered(durable, committed, resume)

    @precondition(lambda self: self.medium != "process")
    @rule(
        resume=RESUME,
        then=RESUME,
        first_is_cut=st.booleans(),
        then_is_cut=st.booleans(),
        share=st.floats(0, 1),
    )
    def die_in_recovery(
        self, resume: str, then: str, first_is_cut: bool, then_is_cut: bool, share: float
    ) -> None:
        """After a kill or a power failure the recovery ends the same way, and another begins."""
        committed, durable = self.run.committed_batch, self.pool.durable_batch
        self._die(is_cut=first_is_cut)
        self.lives.begin(self.path)
        pool = Pool(self.path, resume=resume, **self.options, _assume_reboot=first_is_cut)
        found = pool.committed_batch
        self.lives.end(share)
        pool.core.close(False)
        del pool
        self._leave(is_cut=then_is_cut)
        self._open(self.path, then, is_restart=first_is_cut or then_is_cut)
        is_cut = first_is_cut or then_is_cut
        lowest = min(found, durable if is_cut else committed)
        self._recovered(lowest, committed, then, other=resume)

    def _die(self, *, is_cut: bool = False) -> None:
        """The process ends, or the power fails; `self.path` is then what is left."""
        if self.lives is not None:
            self.lives.end()
            self._abandon()
            self._leave(is_cut=is_cut)
            return
        copy = self._next_path()
        shutil.copytree(self.path, copy)
        self._abandon()
        self.path = copy

    def _leave(self, *, is_cut: bool) -> None:
        """The recorded process has ended."""
        shutil.rmtree(self.path, ignore_errors=True)
        if is_cut:
            self.lives.cut()
        self.path = self._next_path()
        self.lives.write(self.path)

    def _next_path(self) -> Path:
        self.pools += 1
        path = self.folder / f"{self.pools}" / "pool"
        path.parent.mkdir()
        return path

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

    def _recovered(
        self, durable: int, committed: int, resume: str, *, other: str | None = None
    ) -> None:
        """The pool stands where it may. `other`: how an interrupted recovery resumed before."""
        report = self.pool.recovery
        assert report is not None
        found = self.run.committed_batch
        assert durable <= report.committed_batch <= committed
        lag = 2 * self.dense_every - 1
        assert report.committed_batch - lag <= found <= report.committed_batch
        is_exact = "exact" in (resume, other)
        assert found == report.committed_batch or is_exact
        self._check()
        dense = self._counted()
        del self.states[found + 1 :], self.dense[found + 1 :]
        if "latest" not in (resume, other):
            assert dense == self.dense[found]
        else:  # an older dense part goes on with the newest rows
            assert dense in self.dense
            self.dense[found] = dense

    @precondition(lambda self: self.batch is None)
    @rule(back=st.integers(1, 6))
    def rewind(self, back: int) -> None:
        """Back to a batch whose dense part is kept; others come in place of those after it."""
        exact = [point.batch for point in self.pool.rewind_points() if point.is_exact]
        wanted = [batch for batch in exact if batch <= self.run.committed_batch - back]
        assume(wanted)
        self.batches.close()
        found = self.run.rewind(back)
        assert found == wanted[0]
        self._check()
        del self.states[found + 1 :], self.dense[found + 1 :]
        assert self._counted() == self.dense[found]
        self.batches = iter(self.run.batches(Loader(self.names, self.wide)))

    @rule()
    def reopen(self) -> None:
        """An orderly end between two steps loses nothing; in a step it leaves the dense part."""
        number = self.run.committed_batch
        is_mid_step = self.pool.transaction.has_forward
        self.batches.close()
        self.pool.close()
        if self.lives is not None:
            self.lives.end()
        self._let_go()
        assert verify(self.path) == []
        self._open(self.path)
        assert is_mid_step or self.run.committed_batch == number
        self._recovered(number, number, "exact")

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
            self._compare(pool)
        shutil.rmtree(copy)

    def teardown(self) -> None:
        """Nothing is left behind."""
        if self.pool is not None:
            if self.lives is not None:
                self.lives.end()
            self._abandon()
        shutil.rmtree(self.folder)


def settings_for(examples: int) -> settings:
    """Long enough that several crashes follow one another."""
    return settings(max_examples=examples, stateful_step_count=25, deadline=None)


def test_any_order_of_events() -> None:
    """Prints a line that tells how much was tried."""
    run_state_machine_as_test(Training, settings=settings_for(EXAMPLES))
    print(json.dumps({"rig": "stateful", "examples": EXAMPLES, "failures": 0}))
