"""Reading a pool as data: nothing on the medium changes, no torch is needed."""

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainingcxl import _core
from trainingcxl.errors import PoolCorrupted, PoolError
from trainingcxl.pool.pool import Pool
from trainingcxl.pool.table import OPTIMIZERS

__all__ = ["Damage", "inspect", "level_of", "verify"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Damage:
    """One finding of `verify`."""

    region: str
    where: str
    what: str


def inspect(
    path: str | os.PathLike[str], *, device: str = "", digest: bool = False
) -> dict[str, Any]:
    """Reads a pool's head as data, also while a trainer runs; with `digest` also its logical state.

    Args:
        path: The pool's folder.
        device: DAX device that holds it, or a file with a copy of one.
        digest: Also read everything.

    Returns:
        Keys path uuid medium page_bytes durability committed_batch durable_batch epoch position
        finished horizon_batches tables log_bytes log_used_bytes; `digest` and `digest_gbps` on
        request.

    Raises:
        PoolError: There is no pool; or `digest` was asked for while a trainer has it open
            (PoolLocked).
    """
    core = _open_head(path, device)
    facts = core.facts()
    slot = core.slot()
    record = json.loads(slot["resume"]) if slot else {}
    committed = slot["batch"] if slot else None
    durable: int | None = None
    if facts["durability"] == "power":
        is_behind = not facts["was_clean"] and (Path(path) / "journal").exists()
        durable = core.journal_durable() if is_behind else committed
    elif facts["was_clean"] and facts["medium"] != "tmpfs":
        durable = committed
    result: dict[str, Any] = {
        "path": str(path),
        "uuid": facts["uuid"],
        "medium": facts["medium"],
        "file_system": facts["file_system"],
        "page_bytes": facts["page_bytes"],
        "durability": facts["durability"],
        "clean": facts["was_clean"],
        "committed_batch": committed,
        "durable_batch": durable,
        "dense_batch": core.newest_dense_batch(),
        "epoch": record.get("epoch"),
        "position": record.get("batch"),
        "finished": bool(record.get("finished", False)),
        "horizon_batches": core.horizon_batches(),
        "tables": [_table_summary(record) for record in core.tables()],
        "tables_checked": all(record["has_check"] for record in core.tables()),
        "data_bytes": facts["data_bytes"],
        "log_bytes": facts["log_bytes"],
        "log_used_bytes": core.log_bytes_live(),
    }
    del core
    if digest:
        with Pool(path, read_only=True, device=device) as pool:
            started = time.perf_counter()
            result["digest"] = pool.digest()
            seconds = time.perf_counter() - started
            num_bytes = sum(table.num_bytes for table in pool.tables.values())
            result["digest_gbps"] = round(num_bytes / seconds / 1e9, 3)
            result["resumed_batch"] = pool.committed_batch
    return result


def verify(path: str | os.PathLike[str], *, device: str = "") -> list[Damage]:
    """Checks every checksum and invariant of a pool that no trainer has open. Changes nothing.

    Damage inside a table is found where it was created with checksums of rows
    (`Pool(check_rows=True)`), else not; `inspect` tells which: `tables_checked`.

    Args:
        path: The pool's folder.
        device: DAX device that holds it, or a file with a copy of one.

    Raises:
        PoolLocked: A trainer has it open.
        PoolError: There is no pool.
    """
    try:
        core = _core.Pool(
            path=str(path), device=device, durability="process", read_only=True, unlocked=False,
            trust_after_reboot=True, force_medium="", assume_reboot=False, sparse=False,
        )  # fmt: skip
    except PoolCorrupted as error:
        return [Damage(region="head", where=device or str(path), what=str(error))]
    return [Damage(region=region, where=where, what=what) for region, where, what in core.verify()]


def level_of(path: str | os.PathLike[str], device: str = "") -> str:
    """The durability level that a pool was created with."""
    return str(_open_head(path, device).facts()["durability"])


def _open_head(path: str | os.PathLike[str], device: str = "") -> "_core.Pool":
    if not Path(path).is_dir():
        raise PoolError(f"'{path}' holds no pool\n  do:    check the path; training creates a pool")
    return _core.Pool(
        path=str(path), device=device, durability="process", read_only=True, unlocked=True,
        trust_after_reboot=True, force_medium="", assume_reboot=False, sparse=False,
    )  # fmt: skip


def _table_summary(record: Mapping[str, Any]) -> dict[str, Any]:
    names = ("name", "num_embeddings", "embedding_dim", "weight_bytes", "state_bytes")
    return {**{name: record[name] for name in names}, "optimizer": OPTIMIZERS[record["optimizer"]]}
