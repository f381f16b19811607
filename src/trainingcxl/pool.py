"""The pool: tables and logs of one model on persistent memory (paper: the disaggregated memory pool).

Open, create, recover, lock, look at. No torch here: `inspect` and `verify` answer in a fraction of a second.
"""

import hashlib
import json
import os
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt

from trainingcxl import _core
from trainingcxl.errors import PoolCorrupted, PoolError, PoolFull, PoolLocked, TrainingCXLError
from trainingcxl.transaction import Transaction

__all__ = ["Damage", "Pool", "RecoveryReport", "Table", "inspect", "verify"]

Progress = Callable[[str, int, int], None]
OptimizerKind = Literal["sgd", "adagrad", "rowwise-adagrad"]

_OPTIMIZERS: tuple[OptimizerKind, ...] = ("sgd", "adagrad", "rowwise-adagrad")  # order: csrc/kernels.h
_FILES = ("log", "data", "lock")  # lock last: it guards the others while they go
_INIT_BYTES = 64 << 20  # between two progress reports, and two chances for Ctrl-C
_DIGEST_BYTES = 16 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class RecoveryReport:
    """What opening a pool found and did (architecture: section 4, "Recovery")."""

    committed_batch: int
    """Newest committed batch that was found."""
    dense_batch: int
    """Batch of the newest complete dense generation."""
    resumed_batch: int
    """The recovery point: training goes on with the batch after it."""
    batches_undone: int
    """Undo frames applied, newest first; a flagged batch that never committed counts."""
    rows_rolled_back: int
    """Undo records applied."""
    rows_changed: int
    """Of these, rows whose bytes differed from their record."""
    milliseconds: float
    resume: str

    @property
    def batches_to_redo(self) -> int:
        """Committed batches that exact resume trains again, with the same bits."""
        return self.committed_batch - self.resumed_batch


@dataclass(frozen=True, kw_only=True, slots=True)
class Damage:
    """One finding of `verify`."""

    region: str
    where: str
    what: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TableSpec:
    """A table to be created, or to be found with the same shape."""

    name: str
    num_embeddings: int
    embedding_dim: int
    optimizer: OptimizerKind
    init_scale: float
    init_seed: int


class Table:
    """One embedding table of an open pool: weights float32 (R, D), optimizer state float32 (R, S)."""

    def __init__(self, core: "_core.Pool", index: int, record: Mapping[str, Any]) -> None:
        self._core = core
        self.index = index
        self.name: str = record["name"]
        self.num_embeddings: int = record["num_embeddings"]
        self.embedding_dim: int = record["embedding_dim"]
        self.state_dim: int = record["state_dim"]
        self.optimizer: OptimizerKind = _OPTIMIZERS[record["optimizer"]]
        self.init_seed: int = record["init_seed"]
        self.init_scale: float = record["init_scale"]
        self.num_bytes: int = record["weight_bytes"] + record["state_bytes"]

    @property
    def weight(self) -> npt.NDArray[np.float32]:
        """View of the weights, shape (R, D). Read-only: rows change in commits alone."""
        return _read_only(self._core.weight(self.index))

    @property
    def state(self) -> npt.NDArray[np.float32]:
        """View of the optimizer state, shape (R, S); S is 0, 1 or D. Read-only."""
        return _read_only(self._core.state(self.index))


class Pool:
    """Opens the pool at a path, or creates it; recovers it; locks it. A context manager.

    Args:
        path: The pool's folder. Created when it does not exist.
        durability: "process" (kill -9 at any instant) or "power" (power loss; needs DAX persistent memory).
        resume: "exact" goes back to the newest complete dense generation, "latest" keeps the newest
            committed rows with that generation's dense part (the paper's relaxed checkpoint).
        read_only: Nothing on the medium changes; recovery happens in private memory. Several readers may
            share a pool that no trainer has open.
        device: DAX device ("/dev/dax0.0") that holds tables and log; `path` is then its side folder.
        threads: Native threads for lookup and update, the log's writer aside. Default: the CPUs we may use.
        rows_per_batch_max: Refuse larger batches. Default: the log grows with the largest batch.
        log_bytes: Fixed size of the undo log. Default: chosen from the batches.
        lookahead: Announced batches that are prepared ahead.
        trust_after_reboot: Open a "process" pool that was open when the machine restarted. Right after an
            orderly shutdown; wrong after a power loss.
        progress: Called with (what, done bytes, total bytes) while tables are created.

    Raises:
        PoolLocked: Another process has it open; names the pid.
        PoolCorrupted: Checksums contradict each other beyond what a crash explains.
        PoolVersionError: Written by a newer format.
        PoolFull: No space on the medium; nothing is left behind.
        DurabilityUnavailable: The medium cannot give the level.
        RecoveryError: The pool cannot be resumed as asked.

    Blocks until recovered: the time is bounded by the log, not by the tables.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        durability: str = "process",
        resume: str = "exact",
        read_only: bool = False,
        device: str = "",
        threads: int | None = None,
        rows_per_batch_max: int | None = None,
        log_bytes: int | None = None,
        lookahead: int = 1,
        trust_after_reboot: bool = False,
        progress: Progress | None = None,
        _medium: str = "",
        _log: bool = True,
    ) -> None:
        self.path = Path(path)
        if resume not in ("exact", "latest"):
            raise ValueError(f"resume is '{resume}', expected 'exact' or 'latest'")
        if self.path.is_char_device():
            raise ValueError(f"'{path}' is a device: pass a folder as path and device='{path}'")
        if not 1 <= lookahead <= 8:
            raise ValueError(f"lookahead is {lookahead}, expected 1 to 8")
        if threads is not None and threads < 1:
            raise ValueError(f"threads is {threads}, expected 1 or more")
        self.threads = threads or len(os.sched_getaffinity(0))
        self.lookahead = lookahead
        self._progress = progress
        self._closers: list[Callable[[], None]] = []
        self.settle: Callable[[], None] = lambda: None  # a run's: writes the committed dense part
        is_new_folder = not self.path.exists()
        not_ours = [name for name in _FILES if (self.path / name).exists()]
        started = time.perf_counter()
        try:
            self._core = _core.Pool(
                path=str(self.path),
                device=device,
                durability=durability,
                read_only=read_only,
                unlocked=False,
                trust_after_reboot=trust_after_reboot,
                force_fsdax=_medium == "fsdax",
                sparse=_medium == "sparse",
            )
        except PoolLocked:
            raise  # whoever has it may be creating it right now
        except (TrainingCXLError, OSError):
            if not read_only:
                _remove_empty_pool(self.path, keep=not_ours, remove_folder=is_new_folder)
            raise
        try:
            found = self._core.recover(resume == "exact")
        except BaseException:
            self._core.close(False)  # the error's traceback keeps this object alive, not the lock
            raise
        info = self._core.info()
        self.uuid: str = info["uuid"]
        self.medium: str = info["medium"]
        self.file_system: str = info["file_system"]
        self.durability: str = info["durability"]
        self.notices: list[str] = _notices(info)
        self.is_read_only = read_only
        self.is_new = not found["has_point"]
        self.recovery: RecoveryReport | None = None
        self.resume_record: dict[str, Any] | None = None
        if not self.is_new:
            fields = ("committed_batch", "dense_batch", "resumed_batch", "batches_undone", "rows_rolled_back")
            self.recovery = RecoveryReport(
                **{name: found[name] for name in fields},
                rows_changed=found["rows_changed"],
                milliseconds=1000 * (time.perf_counter() - started),
                resume=resume,
            )
            self.resume_record = json.loads(found["resume"])
        self._synced_batch: int | None = found["resumed_batch"] if info["was_clean"] else None
        self._core.start(
            threads=self.threads,
            lookahead=lookahead,
            log_bytes=log_bytes or 0,
            rows_per_batch_max=rows_per_batch_max or 0,
            without_log=not _log,
        )
        self.transaction = Transaction()
        self._owner_pid = os.getpid()
        self._finalizer = weakref.finalize(self, _abandon, self._core, self._owner_pid)

    @property
    def core(self) -> "_core.Pool":
        """The native pool, for the layers above; not for users."""
        return self._core

    # --- tables ---------------------------------------------------------------------------------------

    @property
    def tables(self) -> dict[str, Table]:
        """The tables by name."""
        records = self._core.tables()
        return {record["name"]: Table(self._core, i, record) for i, record in enumerate(records)}

    def create_tables(self, specs: Sequence[TableSpec]) -> None:
        """Creates the tables that the pool lacks; checks the shape of those that it has.

        Initial weights are uniform in [-init_scale, init_scale), a pure function of (seed, table, row).
        All new tables appear together or, after a crash or Ctrl-C, not at all.

        Raises:
            PoolError: A table exists with another shape or optimizer.
            PoolFull: No space; the pool is as it was.
        """
        have = self.tables
        missing = [spec for spec in specs if spec.name not in have]
        for spec in specs:
            if spec.name in have:
                _check_same_shape(self.path, spec, have[spec.name])
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
            rows = [(self._add(spec), spec) for spec in missing]
            total = sum(self.tables[spec.name].num_bytes for spec in missing)
            done = 0
            for index, spec in rows:
                row_bytes = self.tables[spec.name].num_bytes // spec.num_embeddings
                step = max(1, _INIT_BYTES // row_bytes)
                for begin in range(0, spec.num_embeddings, step):
                    end = min(begin + step, spec.num_embeddings)
                    self._core.initialize_rows(index, begin, end)
                    done += (end - begin) * row_bytes
                    if self._progress is not None:
                        self._progress(f"table {spec.name}", done, total)
            self._core.commit_tables()
        except BaseException as error:
            self.close()  # half-made tables are unknown to the geometry; the next open cuts them off
            if isinstance(error, PoolFull) and not have:
                _remove_empty_pool(self.path)  # but a full disk wants its room back now
            raise

    def _add(self, spec: TableSpec) -> int:
        key = int.from_bytes(hashlib.blake2b(spec.name.encode(), digest_size=8).digest(), "little")
        return self._core.add_table(
            name=spec.name,
            rows=spec.num_embeddings,
            dim=spec.embedding_dim,
            optimizer=_OPTIMIZERS.index(spec.optimizer),
            seed=spec.init_seed & 0xFFFFFFFFFFFFFFFF,
            key=key,
            scale=spec.init_scale,
        )

    # --- state ----------------------------------------------------------------------------------------

    @property
    def committed_batch(self) -> int:
        """Newest batch that survives the end of the process."""
        return self._core.committed

    @property
    def durable_batch(self) -> int | None:
        """Newest batch known to survive a power loss; None where the medium or level promises none."""
        if self.durability == "power":
            return self.committed_batch
        return self._synced_batch if self.medium != "tmpfs" else None

    @property
    def page_bytes(self) -> int:
        """Page size that the tables are mapped with."""
        return int(self._core.info()["page_bytes"])

    def sync(self) -> None:
        """Blocks until everything committed is on stable storage, where the medium has any."""
        self._core.sync()
        self._synced_batch = self.committed_batch

    def digest(self) -> str:
        """sha256 over the logical state: tables, optimizer state, dense part, counters, position.

        Not over uuid, layout, log, clocks: equal digests mean that training goes on with equal bits.
        Reads every table: blocks for num_bytes / (about 1 GB/s). In training the dense part of the
        committed batch is written first.

        Raises:
            PoolError: The dense optimizer has stepped beyond the committed batch.
        """
        self.settle()
        sha = hashlib.sha256()
        for name, table in sorted(self.tables.items()):
            shape = [name, table.num_embeddings, table.embedding_dim, table.optimizer]
            sha.update(json.dumps(shape).encode())
            for column in (table.weight, table.state):
                flat = column.reshape(-1).view(np.uint8)
                for begin in range(0, flat.size, _DIGEST_BYTES):
                    sha.update(flat[begin : begin + _DIGEST_BYTES])
        sha.update(f"committed={self.committed_batch}".encode())
        record = self._core.dense_resume()
        if record is not None:
            logical = {k: v for k, v in json.loads(record).items() if k != "volatile"}
            sha.update(json.dumps(logical, sort_keys=True).encode())
            sha.update(self._core.dense_blob())
        return sha.hexdigest()

    # --- life -----------------------------------------------------------------------------------------

    def on_close(self, closer: Callable[[], None]) -> None:
        """Runs `closer` before the pool closes, newest first (a run writes its last generation there)."""
        self._closers.append(closer)

    def close(self) -> None:
        """Syncs, marks the pool clean and lets go of it. Closing again does nothing."""
        if not self._finalizer.alive:
            return
        try:
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
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
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
        raise PoolError(f"pool '{self._path}' is closed\n  do:    open it again with Pool('{self._path}')")


def inspect(path: str | os.PathLike[str], *, digest: bool = False) -> dict[str, Any]:
    """Reads a pool's head as data, also while a trainer runs; with `digest` also its logical state.

    Returns:
        Keys path uuid medium page_bytes durability committed_batch durable_batch epoch position finished
        horizon_batches tables log_bytes log_used_bytes; `digest` and `digest_gbps` on request.

    Raises:
        PoolError: There is no pool; or `digest` was asked for while a trainer has it open (PoolLocked).
    """
    core = _open_head(path)
    info = core.info()
    slot = core.slot()
    record = json.loads(slot["resume"]) if slot else {}
    committed = slot["batch"] if slot else None
    survives = info["durability"] == "power" or (info["was_clean"] and info["medium"] != "tmpfs")
    result: dict[str, Any] = {
        "path": str(path),
        "uuid": info["uuid"],
        "medium": info["medium"],
        "file_system": info["file_system"],
        "page_bytes": info["page_bytes"],
        "durability": info["durability"],
        "clean": info["was_clean"],
        "committed_batch": committed,
        "durable_batch": committed if survives else None,
        "dense_batch": core.newest_dense_batch(),
        "epoch": record.get("epoch"),
        "position": record.get("batch"),
        "finished": bool(record.get("finished", False)),
        "horizon_batches": core.horizon_batches(),
        "tables": [_table_summary(record) for record in core.tables()],
        "tables_checked": False,  # no per-row checksums: damage inside a table is not detected
        "data_bytes": info["data_bytes"],
        "log_bytes": info["log_bytes"],
        "log_used_bytes": core.log_bytes_live(),
    }
    del core
    if digest:
        with Pool(path, read_only=True) as pool:
            started = time.perf_counter()
            result["digest"] = pool.digest()
            seconds = time.perf_counter() - started
            num_bytes = sum(table.num_bytes for table in pool.tables.values())
            result["digest_gbps"] = round(num_bytes / seconds / 1e9, 3)
            result["resumed_batch"] = pool.committed_batch
    return result


def verify(path: str | os.PathLike[str]) -> list[Damage]:
    """Checks every checksum and invariant of a pool that no trainer has open. Changes nothing.

    The tables themselves carry no checksums: damage inside them is not found here.

    Raises:
        PoolLocked: A trainer has it open.
        PoolError: There is no pool.
    """
    try:
        core = _core.Pool(
            path=str(path), device="", durability="process", read_only=True, unlocked=False,
            trust_after_reboot=True, force_fsdax=False, sparse=False,
        )  # fmt: skip
    except PoolCorrupted as error:
        return [Damage(region="head", where=str(path), what=str(error))]
    return [Damage(region=region, where=where, what=what) for region, where, what in core.verify()]


def _open_head(path: str | os.PathLike[str]) -> "_core.Pool":
    if not Path(path).is_dir():
        raise PoolError(f"'{path}' holds no pool\n  do:    check the path; training creates a pool")
    return _core.Pool(
        path=str(path), device="", durability="process", read_only=True, unlocked=True,
        trust_after_reboot=True, force_fsdax=False, sparse=False,
    )  # fmt: skip


def _table_summary(record: Mapping[str, Any]) -> dict[str, Any]:
    names = ("name", "num_embeddings", "embedding_dim", "weight_bytes", "state_bytes")
    return {**{name: record[name] for name in names}, "optimizer": _OPTIMIZERS[record["optimizer"]]}


def _check_same_shape(path: Path, spec: TableSpec, have: Table) -> None:
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


def _notices(found: Mapping[str, Any]) -> list[str]:
    """What a user should know about this medium, and about how the pool was found."""
    notices = [found["creation_note"]] if found["creation_note"] else []
    system = found["file_system"]
    if found["is_network"]:
        notices.append(
            f"the pool lies on {system}, a network file system: a kill is survived, but only this machine may use it"
        )
    if found["is_copy_on_write"]:
        notices.append(
            f"the pool lies on {system}, a copy-on-write file system: in-place updates cost extra writes there; "
            "ext4, xfs or 'chattr +C' on the pool's folder avoid them"
        )
    return notices


def _remove_empty_pool(
    path: Path, *, keep: Sequence[str] = (), remove_folder: bool = True
) -> None:
    """A pool that could not be created leaves nothing behind."""
    for name in _FILES:
        if name not in keep and path.is_dir():
            (path / name).unlink(missing_ok=True)
    if remove_folder and path.is_dir() and not any(path.iterdir()):
        path.rmdir()


def _abandon(core: "_core.Pool", owner_pid: int) -> None:
    """A pool that is dropped without close() stays unclean: the next open recovers it, as after a kill."""
    if os.getpid() == owner_pid:
        core.close(False)
