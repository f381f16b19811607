"""Small trainings on the native engine, recorded: every store, flush, fence and sync of the pool's
files, with marks that say what had been promised by then.
"""

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from power_rows import EPS, LR, Batch, Rows, RowTrainer, TableShape, make_batch

from trainingcxl import _core
from trainingcxl.pool.table import OPTIMIZERS

__all__ = [
    "BLOCK_TRACES", "TRACES", "Plan", "Recorded", "State", "Trace", "Training", "dense_blob",
    "open_core", "record", "recording", "stop_recording",
]  # fmt: skip

# Weights and states of the first are streamed, of the second not: its rows share lines, and two
# states a word.
_TABLES = [TableShape("a", 30, 16, "adagrad"), TableShape("b", 12, 7, "rowwise-adagrad")]
_WIDE = TableShape("wide", 3000, 64, "sgd")
# Several sectors, with rows that few batches change.
_BLOCK_TABLES = [TableShape("a", 80, 16, "adagrad"), TableShape("b", 40, 7, "rowwise-adagrad")]
_EVENT = np.dtype(
    [
        *((name, "u4") for name in ("kind", "thread", "file", "name")),
        *((name, "u8") for name in ("offset", "bytes", "first", "words")),
    ]
)


@dataclass(frozen=True)
class Plan:
    """A training to be recorded."""

    name: str
    dense_every: int = 3
    undo_log: str = "background"
    """Or "fused", or "alternating"."""
    bags: int = 8
    lookups: int = 3
    blob_bytes: int = 1400
    wide_batch: int = -1
    """This batch outgrows the log; negative: none."""
    threads: int = 1
    batches: int = 9
    share: float = 1.0
    """Of the images that each plan gets; less where each takes long."""
    skipped: tuple[int, ...] = (4,)
    medium: str = "fsdax"
    """Or "block": an ordinary file, with a journal."""
    lag_max: int = 8
    keep_dense: int = -1
    """Generations beyond the last two; -1: as many as have room."""
    padding: int = 150
    """Bytes of a resume record, about."""
    has_same_rows: bool = False
    """Of every batch: frames of one size lie where others lay."""
    delays: tuple[tuple[str, int], ...] = ()
    """Microseconds that the recorded training waits at crash points: a slow medium."""
    steps: Callable[["Training"], None] = field(default=lambda training: None)

    @property
    def shapes(self) -> list[TableShape]:
        tables = _BLOCK_TABLES if self.is_block else _TABLES
        return [*tables, _WIDE] if self.wide_batch >= 0 else tables

    @property
    def is_block(self) -> bool:
        return self.medium == "block"

    @property
    def files(self) -> tuple[str, ...]:
        return ("log", "data", "journal") if self.is_block else ("log", "data")

    def batch(self, history: int, number: int) -> Batch:
        made = make_batch(self.shapes, self.bags, self.lookups, history, number)
        if self.has_same_rows:
            return replace(made, ids=make_batch(self.shapes, self.bags, self.lookups, 0, 0).ids)
        if self.wide_batch >= 0:
            wide = np.arange(self.bags * self.lookups).reshape(self.bags, -1) % _WIDE.rows
            ids = wide if number == self.wide_batch else wide % 9
            return replace(made, ids={**made.ids, _WIDE.name: ids})
        return made


class State(NamedTuple):
    """What a batch left behind."""

    rows: Rows
    source: int
    """The history that the batch's data came from."""


class Recorded(NamedTuple):
    """A record as the native core gives it."""

    events: np.ndarray
    places: np.ndarray
    values: np.ndarray
    names: list[str]


@dataclass
class Trace:
    """What was recorded, and what must be found."""

    plan: Plan
    events: np.ndarray
    places: np.ndarray
    values: np.ndarray
    names: list[str]
    histories: list[list["State"]]
    """States after each batch, for each history."""
    overlap: float
    """Share of a batch's rows that the batch before it changed too."""
    fused: float
    """Share of the commits whose log the update wrote."""


def dense_blob(plan: Plan, history: int, batch: int) -> bytes:
    """The dense part after a batch."""
    words = np.zeros(plan.blob_bytes // 8, np.uint64)
    places = np.arange(0, words.size, max(1, words.size // 150))
    words[places] = np.random.default_rng([13, history, batch]).integers(
        0, 2**63, places.size, np.uint64
    )
    return words.tobytes()


def open_core(plan: Plan, path: str, *, after_reboot: bool = False) -> "_core.Pool":
    return _core.Pool(
        path=path, device="", durability="power", read_only=False, unlocked=False,
        trust_after_reboot=False, force_medium=plan.medium, assume_reboot=after_reboot,
        sparse=False,
    )  # fmt: skip


class Training:
    """One training, in one or several lives, that says to the record what it has been promised."""

    def __init__(self, plan: Plan, path: str) -> None:
        self.plan, self.path = plan, path
        self.history = 0
        self.histories: list[list[State]] = [[]]
        self.trainer: RowTrainer | None = None
        self.batch = 0
        self.revision = 0
        self.durable = 0
        """As reported (block)."""
        self.overlaps: list[float] = []
        self.fused = self.commits = 0

    # --- lives

    def create(self) -> None:
        self.core = open_core(self.plan, self.path)
        self.core.recover(True)
        self._start()
        if not self.core.tables():
            self._create_tables()
        self._add_group()
        weights = {s.name: self.core.weight(i) for i, s in enumerate(self.plan.shapes)}
        self.trainer = RowTrainer(self.plan.shapes, weights)
        self.histories = [[State(self.trainer.rows(), 0)]]
        self._mark("history", history=0)
        self._mark("started", batch=0, revision=0)
        self.capture()
        self._mark("acked", batch=0, revision=0)

    def _create_tables(self) -> None:
        for shape in self.plan.shapes:
            self.core.add_table(
                name=shape.name, rows=shape.rows, dim=shape.dim,
                optimizer=OPTIMIZERS.index(shape.optimizer), seed=3, key=shape.rows, scale=0.5,
            )  # fmt: skip
        for index, shape in enumerate(self.plan.shapes):
            self.core.initialize_rows(index, 0, shape.rows)
        self.core.commit_tables()

    def reopen(self, *, exact: bool = True, clean: bool = False, new_data: bool = False) -> None:
        """Ends this life and begins the next, with other data from here on if asked."""
        self.close(clean=clean)
        self.core = open_core(self.plan, self.path)
        self._mark("recovering")
        report = self.core.recover(exact)
        found = {key: report[key] for key in ("resumed_batch", "dense_batch", "is_exact")}
        self._mark("recovered", **found)
        self.go_on(report["resumed_batch"], new_data=new_data)

    def rewind(self, batch: int, *, new_data: bool) -> None:
        """Goes back to a batch whose dense part is kept, in the same life."""
        self.core.drop_announced()
        self.core.wait_dense()
        self._mark("rewinding")
        report = self.core.rewind(batch)
        found = {key: report[key] for key in ("resumed_batch", "dense_batch", "is_exact")}
        self._mark("recovered", **found)
        self._take_up(report["resumed_batch"], new_data=new_data)

    def go_on(self, batch: int, *, new_data: bool) -> None:
        """Trains on from a recovered batch."""
        self._take_up(batch, new_data=new_data)
        self._start()
        self._add_group()

    def _take_up(self, batch: int, *, new_data: bool) -> None:
        self.batch, self.revision, self.durable = batch, 0, batch
        if self.trainer is None:
            self.trainer = RowTrainer(self.plan.shapes, {})
        self.trainer.restore(self.histories[-1][batch].rows)
        if new_data:
            self.history += 1
        self.histories.append(self.histories[-1][: batch + 1])
        self._mark("history", history=len(self.histories) - 1)

    def close(self, *, clean: bool) -> None:
        self.fused += self.core.stats()["fused"]
        self.core.drop_announced()
        self.core.close(clean)

    # --- steps

    def train(self, through: int) -> None:
        """Batches up to number `through`, each announced while the one before it trains."""
        announced: dict[int, int] = {}
        while self.batch < through:
            number = self.batch + 1
            if self.plan.undo_log == "alternating":
                self.core.set_undo_log("fused" if number % 3 == 0 else "background")
            for ahead in (number, number + 1):
                if ahead not in announced and ahead <= self.plan.batches:
                    announced[ahead] = self.core.announce([self._input(ahead)])
            if self.plan.undo_log != "fused":
                time.sleep(0.003)  # so that the background has done its part
            self.note_durable()
            self._step(number, announced[number])
            if number == through and through < self.plan.batches:
                self.core.drop_announced()
        self.core.wait_dense()

    def _step(self, number: int, step_id: int) -> None:
        batch = self.plan.batch(self.history, number)
        assert self.trainer is not None
        parts = []
        if number not in self.plan.skipped:
            out = np.zeros_like(batch.target)
            lookup = self.core.lookup(*self._input(number), out)
            parts.append((lookup, out - batch.target))
            self.trainer.step(batch)
            self._measure_overlap(number, batch)
        self.core.prepare(parts, step_id)
        self.histories[-1].append(State(self.trainer.rows(), self.history))
        self.batch, self.revision = number, 0
        self._mark("started", batch=number, revision=0, source=self.history)
        self.core.commit([(LR, EPS)] * len(self.plan.shapes), 1.0, self.record_bytes())
        if self.plan.is_block:
            self._mark("committed")
            self.note_durable()
        else:
            self._mark("acked", batch=number, revision=0)
        self.commits += 1
        if self.core.is_dense_due():
            self.capture()

    def commit_record(self) -> None:
        """The same batch with another record, as at the end of an epoch."""
        self.core.wait_dense()
        self.revision += 1
        self._mark("started", batch=self.batch, revision=self.revision)
        self.capture()
        self.core.wait_dense()
        self.core.commit_record(self.record_bytes())
        if self.plan.is_block:
            self.core.sync()
        self._mark("acked", batch=self.batch, revision=self.revision)

    def note_durable(self) -> None:
        """Says which batch the library reports as durable, where that is not the committed one."""
        if not self.plan.is_block or self.core.durable_batch() == self.durable:
            return
        self.durable = self.core.durable_batch()
        self._mark("acked", batch=self.durable, revision=0)

    def capture(self) -> None:
        blob = np.frombuffer(dense_blob(self.plan, self.source, self.batch), np.uint8)
        self.core.capture(self.record_bytes(), [(blob.ctypes.data, blob.nbytes)])

    @property
    def source(self) -> int:
        """History of the data of the present batch."""
        return self.histories[-1][self.batch].source

    def record_bytes(self) -> bytes:
        record = {"batch": self.batch, "revision": self.revision, "source": self.source}
        # Differs from batch to batch in each sector, and in its length.
        padding = f"{self.batch}.{self.revision}.{self.source}," * (self.plan.padding // 6)
        return json.dumps({**record, "padding": padding}).encode()

    # --- inside

    def _start(self) -> None:
        form = "background" if self.plan.undo_log == "alternating" else self.plan.undo_log
        fixed = 0 if self.plan.wide_batch >= 0 else 2 << 20
        self.core.start(
            threads=self.plan.threads, lookahead=1, log_bytes=fixed, rows_per_batch_max=0,
            undo_log=form, lag_max=self.plan.lag_max, journal_bytes=4096,
            keep_dense=self.plan.keep_dense,
        )  # fmt: skip
        self.core.set_dense_every(self.plan.dense_every)

    def _add_group(self) -> None:
        features, column = [], 0
        for index, shape in enumerate(self.plan.shapes):
            features.append((shape.name, index, 0, column, -1))
            column += shape.dim
        self.core.add_group(features, column)

    def _input(self, number: int) -> tuple[Any, ...]:
        ids = self.plan.batch(self.history, number).ids
        values = np.concatenate([ids[shape.name].reshape(-1) for shape in self.plan.shapes])
        offsets = np.arange(0, values.size + 1, self.plan.lookups)
        return 0, self.plan.bags, values, offsets, None

    def _measure_overlap(self, number: int, batch: Batch) -> None:
        before = self.plan.batch(self.history, number - 1)
        rows = [set(ids.flat) for ids in batch.ids.values()]
        again = [a & set(before.ids[n].flat) for a, n in zip(rows, batch.ids, strict=True)]
        self.overlaps.append(sum(map(len, again)) / sum(map(len, rows)))

    def _mark(self, what: str, **values: Any) -> None:
        _core.record_mark(json.dumps({"what": what, **values}))


def record(plan: Plan, folder: Path) -> Trace:
    """Runs a plan in `folder`/pool."""
    path = folder / "pool"
    with recording(plan, path, plan.delays) as recorded:
        training = Training(plan, str(path))
        training.create()
        plan.steps(training)
        training.close(clean=True)
    return Trace(
        plan, *recorded[0], training.histories, float(np.mean(training.overlaps)),
        training.fused / max(1, training.commits),
    )  # fmt: skip


@contextlib.contextmanager
def recording(
    plan: Plan, path: Path, delays: tuple[tuple[str, int], ...] = ()
) -> Iterator[list[Recorded]]:
    """Records what happens to a pool; the list holds the record at the end."""
    recorded: list[Recorded] = []
    _core.record_start([str(path / name) for name in plan.files], list(delays))
    try:
        yield recorded
    finally:
        recorded.append(stop_recording())


def stop_recording() -> Recorded:
    """Ends the record that was begun last."""
    events, places, values, names = _core.record_stop()
    return Recorded(
        np.frombuffer(events, _EVENT),
        np.frombuffer(places, np.uint64).astype(np.int64),
        np.frombuffer(values, np.uint64),
        names,
    )


def _plain(training: Training) -> None:
    training.train(5)
    training.history += 1  # another batch 6 comes than the one that was announced and dropped
    training.train(6)
    training.commit_record()
    training.train(8)
    training.reopen(clean=True)
    training.train(9)


def _relive(training: Training) -> None:
    """Batches are taken back, and other ones come in their place."""
    training.train(5)
    training.reopen(new_data=True)
    training.train(7)
    training.reopen(exact=False)
    training.train(9)


def _rewind(training: Training) -> None:
    """Back by several batches, other ones come in their place; and back again across a life."""
    training.train(7)
    training.rewind(3, new_data=True)
    training.train(5)
    training.reopen(new_data=True)
    training.train(8)
    training.rewind(training.plan.dense_every, new_data=True)
    training.train(9)


def _through(training: Training) -> None:
    training.train(training.plan.batches)


TRACES = {
    plan.name: plan
    for plan in (
        Plan("growth", wide_batch=3, bags=350, lookups=8, blob_bytes=3 << 20, batches=5,
             share=0.1, steps=_through),
        Plan("background", steps=_plain),
        Plan("fused", undo_log="fused", dense_every=1, steps=_plain),
        Plan("relive", steps=_relive),
        Plan("relive fused", undo_log="fused", steps=_relive),
        Plan("alternating", undo_log="alternating", dense_every=1, steps=_relive),
        Plan("rewind", dense_every=3, steps=_rewind),
        Plan("rewind fused", undo_log="fused", dense_every=1, steps=_rewind, share=0.5),
        Plan("workers", bags=520, lookups=8, threads=2, batches=5, steps=_through),
        Plan("workers fused", undo_log="fused", bags=520, lookups=8, threads=2, batches=5,
             steps=_through),
    )
}  # fmt: skip


def _block(name: str, steps: Callable[[Training], None], **settings: Any) -> Plan:
    """Few batches fill the journal: their resume records are long."""
    usual = {"bags": 12, "lookups": 7, "padding": 36_000, "batches": 14, "lag_max": 2}
    return Plan(name, medium="block", steps=steps, **{**usual, **settings})


def _journaled(training: Training) -> None:
    training.train(6)
    training.commit_record()
    training.train(10)
    training.reopen(clean=True)
    training.train(14)


def _rewind_journaled(training: Training) -> None:
    """Again and again, also after a kill."""
    training.train(9)
    training.rewind(3, new_data=True)
    training.train(7)
    training.reopen(new_data=True)
    training.train(11)
    training.rewind(5, new_data=True)
    training.train(14)


def _rewind_behind_base(training: Training) -> None:
    """The journal's base is the batch of the last opening: it knows no row that changed before."""
    training.train(7)
    training.reopen(new_data=True)
    training.train(9)
    training.rewind(2, new_data=True)
    training.train(6)


def _relive_journaled(training: Training) -> None:
    training.train(6)
    training.reopen(new_data=True)
    training.train(9)
    training.reopen(exact=False)
    training.train(14)


_SLOW_JOURNAL = (("journal: frames written", 5_000),)
_SLOWER_JOURNAL = (("journal: frames written", 25_000),)
_SLOW_DENSE = (("dense: slice", 60_000),)
_SLOW_TABLES = (("data: sync", 300_000), ("dense: slice", 1_000))

BLOCK_TRACES = {
    plan.name: plan
    for plan in (
        _block("journal", _journaled),
        _block("lag", _through, dense_every=1, lag_max=3, keep_dense=0, delays=_SLOW_JOURNAL),
        _block("lag far", _through, dense_every=2, lag_max=4, keep_dense=0, has_same_rows=True,
               delays=_SLOWER_JOURNAL),
        _block("lag fused", _through, undo_log="fused", delays=_SLOW_JOURNAL),
        _block("checkpoint", _through, delays=_SLOW_TABLES, batches=20, padding=24_000),
        _block("slow dense", _through, delays=_SLOW_DENSE, batches=20, padding=24_000),
        _block("rewound", _rewind_journaled, dense_every=1),
        _block("behind base", _rewind_behind_base, dense_every=1, batches=9),
        _block("relived", _relive_journaled, delays=_SLOW_JOURNAL),
        _block("same rows", _relive_journaled, has_same_rows=True, dense_every=1),
        _block("grown", _through, wide_batch=6, bags=16, lookups=8, delays=_SLOW_JOURNAL),
    )
}
