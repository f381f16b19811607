"""Open, create, recover, lock a pool."""

import hashlib
import json
import os
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from trainingcxl import _core
from trainingcxl.errors import PoolError, PoolFull, PoolLocked, TrainingCXLError
from trainingcxl.pool.opening import check_lookup, check_options, notices_of
from trainingcxl.pool.recovery import RecoveryReport, lookup_of, recall_previous
from trainingcxl.pool.rewind import RewindPoint, choose_point, find_points
from trainingcxl.pool.snapshot import Snapshot, SnapshotDesk, remove_unfinished
from trainingcxl.pool.table import OPTIMIZERS, Table, TableSpec, check_same_shape
from trainingcxl.pool.write_back import write_back_notice
from trainingcxl.transaction import Transaction

__all__ = ["Pool", "RecoveryReport"]

Progress = Callable[[str, int, int], None]
# Not part of the digest: clocks and places, and generators, which a script may leave unseeded.
_NOT_LOGICAL = ("volatile", "rng", "epoch_rng", "fetch_rng")
_FILES = ("log", "data", "journal", "lock")  # lock last: it guards the others while they go
_INIT_BYTES = 64 << 20  # between two progress reports, and two chances for Ctrl-C
_DIGEST_BYTES = 16 << 20


class Pool:
    """Opens the pool at a path, or creates it; recovers it; locks it. A context manager.

    Args:
        path: The pool's folder. Created when it does not exist.
        durability: "process" (kill -9 at any instant) or "power" (power loss as well: at once on
            DAX persistent memory, `durable_batch` follows a few batches behind on an ordinary
            file); "auto": the one that the pool was created with, "process" for a new pool.
        resume: "exact" goes back to the newest complete dense generation, "latest" keeps the newest
            committed rows with that generation's dense part (the paper's relaxed checkpoint).
        read_only: Nothing on the medium changes; recovery happens in private memory. Several
            readers may share a pool that no trainer has open.
        device: DAX device ("/dev/dax0.0") that holds tables and log; `path` is then its side
            folder.
        threads: Native threads for lookup and update, the background log's writer aside. Default:
            the CPUs we may use.
        rows_per_batch_max: Refuse larger batches. Default: the log grows with the largest batch.
        log_bytes: Fixed size of the undo log. Default: chosen from the batches.
        keep_dense: Dense parts kept beyond the last two, for `rewind`: 0 to 14, spread over the
            batches that the undo log reaches; "auto": as many as a tenth of it has room for.
        lookahead: Announced batches that are prepared ahead.
        lookup: "strict", or "relaxed": batch N + 1 is looked up in the background before the update
            of batch N and corrected after it (the paper's relaxed lookup). Either is the same to
            the bit at every resume; the last bits of the one are not those of the other. Not with
            level "power" on an ordinary file.
        undo_log: Who writes the undo log: "background" (a thread of its own ahead of the step, the
            paper's batch-aware checkpoint), "fused" (the update itself), "auto" (the background as
            long as its work fits into the time that the step spends outside the pool). The results
            are the same, bit for bit.
        lag_max: Level "power" on an ordinary file: commits that may wait for their sync; the next
            one waits for the oldest.
        journal_bytes: Level "power" on an ordinary file: first size of the journal's ring; it
            grows with the batches. Default: 64 MiB to 1 GiB.
        check_rows: Tables are created with a checksum in every row: `verify` then finds damage in
            them, and a batch that would change a damaged row is refused. Costs 4 bytes a row and
            some time in the update (docs/performance.md). Tables that exist stay as they are.
        trust_after_reboot: Open a "process" pool that was open when the machine restarted. Right
            after an orderly shutdown; wrong after a power loss.
        progress: Called with (what, done bytes, total bytes) while tables are created.

    Raises:
        PoolLocked: Another process has it open; names the pid.
        PoolCorrupted: Checksums contradict each other beyond what a crash explains.
        PoolVersionError: Written by a newer format.
        PoolFull: No space on the medium; nothing is left behind.
        DurabilityUnavailable: The medium cannot give the level, or the pool has another.
        RecoveryError: The pool cannot be resumed as asked.

    Blocks until recovered: the time is bounded by the log, not by the tables.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        durability: str = "auto",
        resume: str = "exact",
        read_only: bool = False,
        device: str = "",
        threads: int | None = None,
        rows_per_batch_max: int | None = None,
        log_bytes: int | None = None,
        keep_dense: int | str = "auto",
        lookahead: int = 1,
        lookup: str = "strict",
        undo_log: str = "auto",
        lag_max: int = 16,
        journal_bytes: int | None = None,
        check_rows: bool = False,
        trust_after_reboot: bool = False,
        progress: Progress | None = None,
        _medium: str = "",
        _assume_reboot: bool = False,
        _log: bool = True,
    ) -> None:
        self.path = Path(path)
        check_options(path, resume, lookahead, lookup, undo_log, threads, lag_max, keep_dense)
        self.threads, self.lookahead = threads or len(os.sched_getaffinity(0)), lookahead
        self.lookup, self.is_read_only = lookup, read_only
        self._progress, self._check_rows = progress, check_rows
        self._closers: list[Callable[[], None]] = []
        self.settle: Callable[[], None] = lambda: None  # a run's: writes the committed dense part
        started = time.perf_counter()
        self._core = self._open(
            device=device,
            durability=durability,
            read_only=read_only,
            trust_after_reboot=trust_after_reboot,
            force_medium=_medium if _medium in ("fsdax", "block", "devdax") else "",
            assume_reboot=_assume_reboot,
            sparse=_medium == "sparse",
        )
        found = self._recover(is_exact=resume == "exact")
        facts = self._core.facts()
        self.uuid, self.medium = str(facts["uuid"]), str(facts["medium"])
        self.durability: str = facts["durability"]
        self.notices: list[str] = notices_of(facts)
        self.is_new = not found["has_point"]
        self.recovery: RecoveryReport | None = None
        self.resume_record: dict[str, Any] | None = None
        if not self.is_new:
            self.recovery = RecoveryReport.of(found, time.perf_counter() - started)
            self.resume_record = json.loads(found["resume"])
        self._synced_batch: int | None = found["resumed_batch"] if facts["was_clean"] else None
        self._core.start(
            threads=self.threads,
            lookahead=lookahead,
            log_bytes=log_bytes or 0,
            rows_per_batch_max=rows_per_batch_max or 0,
            undo_log=undo_log if _log else "none",
            lag_max=lag_max,
            journal_bytes=journal_bytes or 0,
            keep_dense=-1 if keep_dense == "auto" else int(keep_dense),
            is_relaxed=lookup == "relaxed",
        )
        self._recall_previous()
        self._note_write_back()
        self.transaction, self._owner_pid = Transaction(), os.getpid()
        self._snapshot: Snapshot | None = None
        self.desk = SnapshotDesk(self.path, self._take, is_trainer=not read_only)
        self._finalizer = weakref.finalize(self, _abandon, self._core, self._owner_pid)

    def _open(self, *, read_only: bool, **options: Any) -> "_core.Pool":
        """Opens the files; a pool that cannot be created leaves nothing behind."""
        self._is_new_folder = not self.path.exists()
        self._not_ours = [name for name in _FILES if (self.path / name).exists()]
        try:
            return _core.Pool(path=str(self.path), read_only=read_only, unlocked=False, **options)
        except PoolLocked:
            raise  # whoever has it may be creating it right now
        except (TrainingCXLError, OSError):
            if not read_only:
                self._remove_created()
            raise

    def _recover(self, *, is_exact: bool) -> dict[str, Any]:
        """Finds the recovery point; the end of the creation, where there was none."""
        try:
            check_lookup(self.path, self.lookup, self._core.facts())
            return self._core.recover(is_exact)
        except BaseException as error:
            was_created = self._core.facts()["was_created"]
            self._core.close(False)  # the error's traceback keeps this object alive, not the lock
            if was_created and isinstance(error, TrainingCXLError | OSError):
                self._remove_created()
            raise

    def _remove_created(self) -> None:
        _remove_empty_pool(self.path, keep=self._not_ours, remove_folder=self._is_new_folder)

    @property
    def core(self) -> "_core.Pool":
        """The native pool, for the layers above; not for users."""
        return self._core

    # --- tables

    @property
    def tables(self) -> dict[str, Table]:
        """The tables by name."""
        records = self._core.tables()
        return {record["name"]: Table(self._core, i, record) for i, record in enumerate(records)}

    def create_tables(self, specs: Sequence[TableSpec]) -> None:
        """Creates the tables that the pool lacks; checks the shape of those that it has.

        Initial weights are uniform in [-init_scale, init_scale), a pure function of (seed, table,
        row). All new tables appear together or, after a crash or Ctrl-C, not at all.

        Raises:
            PoolError: A table exists with another shape or optimizer.
            PoolFull: No space; the pool is as it was.
        """
        have = self.tables
        missing = [spec for spec in specs if spec.name not in have]
        for spec in specs:
            if spec.name in have:
                check_same_shape(self.path, spec, have[spec.name])
        if self._check_rows and not all(table.has_check for table in have.values()):
            self.notices.append("the pool's tables were created without checksums of rows")
        if not missing:
            return
        if not self.is_new:
            names = ", ".join(f"'{spec.name}'" for spec in missing)
            raise PoolError(
                f"pool '{self.path}' has no table {names} and has already committed batches\n"
                f"  where: it has {sorted(have)}\n"
                "  do:    use the tables that it has, or another pool"
            )
        try:
            self._fill([(self._add(spec), spec) for spec in missing])
            self._core.commit_tables()
        except BaseException as error:
            # half-made tables are unknown to the geometry; the next open cuts them off
            self.close()
            if isinstance(error, PoolFull) and not have:
                _remove_empty_pool(self.path)  # but a full disk wants its room back now
            raise
        self._note_write_back()

    def _note_write_back(self) -> None:
        """Tells who trains in a file whose changed pages are more than the kernel keeps."""
        if self.medium == "block" and not self.is_read_only:
            num_bytes = sum(table.num_bytes for table in self.tables.values())
            self.notices += filter(None, [write_back_notice(num_bytes)])

    def _fill(self, tables: Sequence[tuple[int, TableSpec]]) -> None:
        """Gives all rows of new tables their initial values."""
        total = sum(self.tables[spec.name].num_bytes for _, spec in tables)
        done = 0
        for index, spec in tables:
            row_bytes = self.tables[spec.name].num_bytes // spec.num_embeddings
            step = max(1, _INIT_BYTES // row_bytes)
            for begin in range(0, spec.num_embeddings, step):
                end = min(begin + step, spec.num_embeddings)
                self._core.initialize_rows(index, begin, end)
                done += (end - begin) * row_bytes
                if self._progress is not None:
                    self._progress(f"table {spec.name}", done, total)

    def _add(self, spec: TableSpec) -> int:
        key = int.from_bytes(hashlib.blake2b(spec.name.encode(), digest_size=8).digest(), "little")
        return self._core.add_table(
            name=spec.name,
            rows=spec.num_embeddings,
            dim=spec.embedding_dim,
            optimizer=OPTIMIZERS.index(spec.optimizer),
            seed=spec.init_seed & 0xFFFFFFFFFFFFFFFF,
            key=key,
            scale=spec.init_scale,
            has_check=self._check_rows,
        )

    # --- state

    @property
    def committed_batch(self) -> int:
        """Newest batch that survives the end of the process."""
        return self._core.committed

    @property
    def durable_batch(self) -> int | None:
        """Newest batch known to survive a power loss; None where the medium or level promises
        none.
        """
        if self.durability == "power":
            behind = self._core.durable_batch()
            return self.committed_batch if behind is None else int(behind)
        return self._synced_batch if self.medium != "tmpfs" else None

    @property
    def page_bytes(self) -> int:
        """Page size that the tables are mapped with."""
        return int(self._core.facts()["page_bytes"])

    def sync(self) -> None:
        """Blocks until everything committed is on stable storage, where the medium has any."""
        self._core.sync()
        self._synced_batch = self.committed_batch

    def digest(self) -> str:
        """sha256 over the logical state: tables, optimizer state, dense part, counters, position.

        Not over uuid, layout, log, clocks, generators: with equal generators, equal digests mean
        that training goes on with equal bits. Reads every table: blocks for num_bytes / (about 1
        GB/s). In training the dense part of the committed batch is written first.

        Raises:
            PoolError: The dense optimizer has stepped beyond the committed batch.
        """
        self.settle()
        sha = hashlib.sha256()
        for name, table in sorted(self.tables.items()):
            shape = [name, table.num_embeddings, table.embedding_dim, table.optimizer]
            sha.update(json.dumps(shape).encode())
            for column in (table.weight, table.state):
                rows = max(1, _DIGEST_BYTES // max(1, 4 * column.shape[1]))
                for begin in range(0, len(column), rows):  # without their checksums
                    sha.update(np.ascontiguousarray(column[begin : begin + rows]).data)
        sha.update(f"committed={self.committed_batch}".encode())
        record, blob = self._core.dense_resume(), self._core.dense_blob()
        if record is not None and blob is not None:
            logical = {k: v for k, v in json.loads(record).items() if k not in _NOT_LOGICAL}
            sha.update(json.dumps(logical, sort_keys=True).encode())
            sha.update(blob.data)
        return sha.hexdigest()

    def snapshot(self, path: str | os.PathLike[str], *, wait: bool = True) -> Snapshot:
        """Copies the committed batch, while training goes on, to a new pool.

        The copy is made by a thread of the lowest priority. It holds tables, optimizer state, dense
        part, position: it can be opened, evaluated, and trained on. Call between two batches; the
        dense part of the committed batch is written first.

        Args:
            path: An empty or new folder.
            wait: Return when it is complete and on the medium; else see Snapshot.wait.

        Raises:
            PoolError: The folder holds something, or another snapshot is being taken.
            PoolFull: No space; nothing is left behind. The training may go on.
        """
        target = Path(path)
        if target.resolve().is_relative_to(self.path.resolve()):
            raise PoolError(
                f"'{target}' is inside pool '{self.path}'\n"
                "  state: it is unchanged\n  do:    choose a path outside the pool"
            )
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise PoolError(
                f"'{target}' is not an empty folder\n"
                "  state: it is unchanged\n  do:    choose another path for the snapshot"
            )
        if not self.is_read_only:
            self.settle()
        try:
            self._core.begin_snapshot(str(target))
        except (TrainingCXLError, OSError):
            remove_unfinished(target)
            raise
        self._snapshot = Snapshot(self._core, target)
        if wait:
            self._snapshot.wait()
        return self._snapshot

    def _finish_snapshots(self) -> None:
        self.desk.finish()
        if self._snapshot is not None and not self._snapshot.is_done:
            self._snapshot.wait()

    def _take(self, path: str) -> Snapshot:
        return self.snapshot(path, wait=False)

    # --- rewind

    def rewind_points(self) -> list[RewindPoint]:
        """Batches before the committed one that the undo log reaches, newest first: reads it."""
        self._finish_snapshots()
        is_relaxed = "relaxed" in (self.lookup, lookup_of(self.resume_record))
        return find_points(self._core, self.committed_batch, needs_previous=is_relaxed)

    def rewind(self, *, batches: int | None = None, to: int | None = None) -> RecoveryReport:
        """Makes an earlier batch the committed one; those after it are gone for good.

        For a pool without a run, as the command `rewind` opens it; in a training loop use
        `run.rewind`. Killed at any instant, the next opening finds the old or the new batch.

        Args:
            batches: Back by at least so many, to the next exact point; or
            to: to this batch.

        Raises:
            RecoveryError: There is no such exact point; names those that there are.
        """
        if self.transaction.has_run:
            raise PoolError("a run trains this pool\n  do:    call run.rewind(batches)")
        target = choose_point(
            self.path, self.rewind_points(), self.committed_batch, batches=batches, to=to
        )
        return self.take_back(target)

    def take_back(self, batch: int) -> RecoveryReport:
        """As `rewind`, for the layers above: they bring their own state in line."""
        started = time.perf_counter()
        found = self._core.rewind(batch)
        self.resume_record = json.loads(found["resume"])
        self.recovery = RecoveryReport.of(found, time.perf_counter() - started)
        self._synced_batch = None
        self._recall_previous()
        return self.recovery

    def _recall_previous(self) -> None:
        if self.lookup == "relaxed" and not self.is_read_only:
            self.notices += recall_previous(self._core, self.resume_record)

    # --- life

    def on_close(self, closer: Callable[[], None]) -> None:
        """Runs `closer` before the pool closes, newest first (a run writes its last generation
        there).
        """
        self._closers.append(closer)

    def close(self) -> None:
        """Syncs, marks the pool clean and lets go of it. Closing again does nothing."""
        if not self._finalizer.alive:
            return
        try:
            self._finish_snapshots()
            while self._closers and os.getpid() == self._owner_pid:
                self._closers.pop()()
        finally:
            self._finalizer.detach()
            self._release(is_clean=True)

    def _release(self, *, is_clean: bool) -> None:
        try:
            self._core.close(is_clean)
        finally:
            self._core = _Closed(self.path)  # type: ignore[assignment]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Pool('{self.path}', {self.durability} on {self.medium}, uuid {self.uuid})"

    @staticmethod
    def discard(path: str | os.PathLike[str]) -> None:
        """Deletes the pool's files at `path`; other files in the folder stay.

        Raises:
            PoolLocked: A process has it open.
        """
        if Path(path).is_dir():
            _core.discard_pool(str(path))


class _Closed:
    """Stands where the native pool was: any use says that the pool is closed."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __getattr__(self, name: str) -> Any:
        raise PoolError(
            f"pool '{self._path}' is closed\n  do:    open it again with Pool('{self._path}')"
        )


def _remove_empty_pool(path: Path, *, keep: Sequence[str] = (), remove_folder: bool = True) -> None:
    """A pool that could not be created leaves nothing behind."""
    for name in _FILES:
        if name not in keep and path.is_dir():
            (path / name).unlink(missing_ok=True)
    if remove_folder and path.is_dir() and not any(path.iterdir()):
        path.rmdir()


def _abandon(core: "_core.Pool", owner_pid: int) -> None:
    """A pool that is dropped without close() stays unclean: the next open recovers it, as after
    a kill.
    """
    if os.getpid() == owner_pid:
        core.close(False)
