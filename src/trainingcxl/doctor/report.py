"""The report: what PATH is, what lies below it, what a pool would get there."""

import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trainingcxl.doctor import disk, machine
from trainingcxl.doctor.advice import advise
from trainingcxl.doctor.measure import measure_writes
from trainingcxl.doctor.trial import Trial, try_pool
from trainingcxl.errors import PoolError, TrainingCXLError
from trainingcxl.pool import inspect
from trainingcxl.pool.write_back import dirty_limits, memory

__all__ = ["diagnose"]

_OF_A_POOL = (
    "medium", "file_system", "page_bytes", "durability", "clean", "committed_batch",
    "durable_batch", "horizon_batches", "data_bytes", "log_bytes", "log_used_bytes",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Place:
    """What a path is, and where something may be tried.

    Attributes:
        kind: What the path is.
        seen: Folder (or device) whose file system is described.
        probed: Folder in which a pool and a file may be made; None for none.
        why_not: Why `probed` is None.
    """

    kind: Literal["pool", "folder", "new pool", "dax device"]
    seen: Path
    probed: Path | None
    why_not: str = ""


def diagnose(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Look at a path, try a small pool and some writes beside it, and say what that means.

    Args:
        path: A folder, a pool, the path of a pool to be made (its folder is looked at), or a DAX
            device.

    Returns:
        JSON data with the keys path, kind, level, medium, speed, memory, cpu, versions, pool (for
        a pool) and advice. A fact that could not be found out is None.

    Raises:
        PoolError: There is nothing at the path that a pool could be or be made in.

    Blocks for some seconds. Nothing is left behind; an existing pool or device is not written to.
    """
    path = Path(path)
    place = _place_of(path)
    is_device = place.kind == "dax device"
    mount = None if is_device else disk.mount_of(place.seen)
    drive = disk.block_device(mount.device) if mount is not None else None
    trial = _device_trial(path) if is_device else Trial()
    if place.probed is not None:
        trial = try_pool(place.probed, path)
    pool = _look_at_pool(path) if place.kind == "pool" else None
    report: dict[str, Any] = {
        "path": str(path),
        "kind": place.kind,
        "level": _level(place, trial),
        "medium": _medium(place, mount, drive, trial, pool),
    }
    report["speed"] = _speed(place, report["medium"]["free_bytes"])
    report["memory"] = memory()
    report["memory"]["dirty"] = dirty_limits(report["memory"]["available_bytes"])
    report["memory"]["cgroup"] = machine.cgroup_limits(drive["disk"] if drive else None)
    report["cpu"] = machine.cpu()
    report["versions"] = machine.versions()
    if pool is not None:
        report["pool"] = pool
    report["advice"] = advise(report)
    return report


def _place_of(path: Path) -> _Place:
    if path.is_char_device():
        return _Place("dax device", path, None, "a write to a device would damage a pool on it")
    if path.is_dir():
        if not _holds_pool(path):
            return _Place("folder", path, path)
        above = path / ".."
        if above.stat().st_dev != path.stat().st_dev:
            return _Place(
                "pool",
                path,
                None,
                "the pool is a mount point: beside it lies another file system",
            )
        return _Place("pool", path, above)
    if path.exists():
        raise PoolError(
            f"'{path}' is a file, a pool is a folder\n"
            "  do:    name a folder, a pool, or a DAX device"
        )
    if not path.parent.is_dir():
        raise PoolError(
            f"'{path}' does not exist, nor does the folder that it would be made in, "
            f"'{path.parent}'\n  do:    make that folder, or check the path"
        )
    return _Place("new pool", path.parent, path.parent)


def _holds_pool(folder: Path) -> bool:
    """Return whether a folder is a pool, one on a DAX device, or a copy of one."""
    return (folder / "lock").is_file() or all((folder / n).is_file() for n in ("log", "data"))


def _device_trial(path: Path) -> Trial:
    """What the engine would say of a DAX device: to ask it would write to the device."""
    trial = Trial(medium="devdax", file_system="devdax")
    flush = machine.cpu()["best_flush"]
    if not os.access(path, os.R_OK | os.W_OK):
        trial.refused = dict.fromkeys(("power", "process"), "this user may not open the device")
    elif platform.machine() != "x86_64" or flush is None:
        trial.level = "process"
        trial.refused = {"power": "power needs the flush instructions of x86-64"}
    else:
        trial.level, trial.flush = "power", flush
    return trial


def _level(place: _Place, trial: Trial) -> dict[str, Any]:
    is_probed = place.probed is not None or place.kind == "dax device"
    return {
        "possible": trial.level,
        "is_probed": is_probed,
        "why_not_higher": trial.refused if is_probed else {"power": place.why_not},
    }


def _medium(
    place: _Place,
    mount: disk.Mount | None,
    drive: dict[str, Any] | None,
    trial: Trial,
    pool: dict[str, Any] | None,
) -> dict[str, Any]:
    """Return what is below the path; a pool that exists knows best what it lies on."""
    known = pool or {}
    drive = drive or {}
    if place.kind == "dax device":
        size = {**disk.dax_device(place.seen), "free_bytes": None}
    else:
        size = disk.space(place.seen)
    medium = known.get("medium") or trial.medium
    return {
        "medium": medium,
        "file_system": known.get("file_system") or trial.file_system,
        "mounted_as": mount.type if mount else None,
        "mount_options": mount.options if mount else [],
        "is_dax": medium in ("devdax", "fsdax") if medium else None,
        "is_network": trial.is_network or bool(mount and mount.is_network),
        "is_copy_on_write": trial.is_copy_on_write or bool(mount and mount.is_copy_on_write),
        "page_bytes": known.get("page_bytes") or trial.page_bytes,
        "flush": trial.flush,
        "persistence_domains": disk.persistence_domains(),
        "disk_model": drive.get("model"),
        "is_rotational": drive.get("is_rotational"),
        "write_cache": drive.get("write_cache"),
        **size,
    }


def _speed(place: _Place, free_bytes: int | None) -> dict[str, Any]:
    if place.probed is None or free_bytes is None:
        return {"not_measured": place.why_not}
    try:
        return measure_writes(place.probed, free_bytes)
    except OSError as error:
        return {"not_measured": error.strerror}


def _look_at_pool(path: Path) -> dict[str, Any]:
    """Return what an existing pool says of itself; also while it is being trained."""
    try:
        found = inspect(path)
    except (TrainingCXLError, OSError) as error:
        return {"unreadable": str(error).partition("\n")[0]}
    return {name: found[name] for name in _OF_A_POOL}
