"""Facts about the machine that have nothing to do with a path: versions, CPU, memory, limits.

Every function takes the roots of /proc and /sys, so that tests can show it another machine. A fact
that cannot be read is None: a report with a gap is worth more than none.
"""

import os
import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from trainingcxl import __version__, _core
from trainingcxl.pool.write_back import read_number, read_text

__all__ = ["cgroup_limits", "cpu", "versions"]

PROC, SYS = Path("/proc"), Path("/sys")

_CPU_FLAGS = ("sse4_2", "avx2", "avx512f", "clflush", "clflushopt", "clwb")
_FLUSHES = ("clwb", "clflushopt", "clflush")  # the order in which the engine prefers them
_ENVIRONMENT = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "TRAININGCXL_FLUSH")
_UNLIMITED = 1 << 60  # cgroup v1 writes "no limit" as a number that no machine has


def versions() -> dict[str, str | None]:
    """Return the versions of what takes part; torch is looked up, not imported."""
    return {
        "trainingcxl": __version__,
        "torch": _installed("torch"),
        "numpy": _installed("numpy"),
        "python": platform.python_version(),
        "kernel": f"{os.uname().sysname} {os.uname().release}",
    }


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def cpu(proc: Path = PROC) -> dict[str, Any]:
    """Return model, cores that this process may use, vector width and flush instruction."""
    fields: dict[str, str] = {}
    for line in (read_text(proc / "cpuinfo") or "").splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    present = set(fields.get("flags", "").split())
    return {
        "model": fields.get("model name") or platform.machine(),
        "machine": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "vector_width": _core.isa(),
        "flags": [flag for flag in _CPU_FLAGS if flag in present],
        "best_flush": next((flush for flush in _FLUSHES if flush in present), None),
        "environment": {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
    }


def cgroup_limits(device: str | None, proc: Path = PROC, sys: Path = SYS) -> dict[str, Any]:
    """Return the limits that control groups set for this process; the tightest level counts.

    Args:
        device: "major:minor" of the disk whose limits are asked for; None for none.
        proc: Root of /proc.
        sys: Root of /sys.

    Returns:
        memory_bytes, memory_high_bytes, memory_used_bytes, cpus, write_bytes_per_s,
        writes_per_s: None where there is no limit. The groups' names are left out: they may hold a
        user's.
    """
    groups = {}
    for line in (read_text(proc / "self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            groups[controller] = path.lstrip("/")
    found: dict[str, Any] = dict.fromkeys(
        ("memory_bytes", "memory_high_bytes", "memory_used_bytes", "cpus",
         "write_bytes_per_s", "writes_per_s")
    )  # fmt: skip
    for root in (sys / "fs/cgroup", sys / "fs/cgroup/unified"):
        for folder in _levels(root, groups.get("", "")):
            _unified(folder, device, found)
    for controller, apply in (("memory", _memory_v1), ("cpu", _cpu_v1), ("blkio", _blkio_v1)):
        for folder in _levels(sys / "fs/cgroup" / controller, groups.get(controller, "")):
            apply(folder, device, found)
    return found


def _levels(root: Path, path: str) -> Iterator[Path]:
    """Yield the group's folder and its parents up to the root; in a container only the root."""
    folder = root / path
    while folder != root:
        if folder.is_dir():
            yield folder
        folder = folder.parent
    if root.is_dir():
        yield root


def _tighten(found: dict[str, Any], name: str, value: float | None) -> None:
    if value is not None and value < _UNLIMITED:
        found[name] = value if found[name] is None else min(found[name], value)


def _unified(folder: Path, device: str | None, found: dict[str, Any]) -> None:
    _tighten(found, "memory_bytes", read_number(folder / "memory.max"))
    _tighten(found, "memory_high_bytes", read_number(folder / "memory.high"))
    _first(found, "memory_used_bytes", read_number(folder / "memory.current"))
    quota, _, period = (read_text(folder / "cpu.max") or "").partition(" ")
    if quota.isdecimal() and period.isdecimal():
        _tighten(found, "cpus", int(quota) / int(period))
    for line in (read_text(folder / "io.max") or "").splitlines():
        disk, *limits = line.split()
        values = dict(limit.split("=", 1) for limit in limits)
        if disk == device:
            for name, key in (("write_bytes_per_s", "wbps"), ("writes_per_s", "wiops")):
                text = values.get(key, "")
                _tighten(found, name, int(text) if text.isdecimal() else None)


def _first(found: dict[str, Any], name: str, value: int | None) -> None:
    if found[name] is None:
        found[name] = value


def _memory_v1(folder: Path, device: str | None, found: dict[str, Any]) -> None:
    _tighten(found, "memory_bytes", read_number(folder / "memory.limit_in_bytes"))
    _first(found, "memory_used_bytes", read_number(folder / "memory.usage_in_bytes"))


def _cpu_v1(folder: Path, device: str | None, found: dict[str, Any]) -> None:
    quota, period = (
        read_number(folder / "cpu.cfs_quota_us"),
        read_number(folder / "cpu.cfs_period_us"),
    )
    if quota and period:  # a quota of -1 is none, and no number here
        _tighten(found, "cpus", quota / period)


def _blkio_v1(folder: Path, device: str | None, found: dict[str, Any]) -> None:
    for name, file in (("write_bytes_per_s", "bps"), ("writes_per_s", "iops")):
        text = read_text(folder / f"blkio.throttle.write_{file}_device") or ""
        for line in text.splitlines():
            disk, _, value = line.partition(" ")
            if disk == device and value.isdecimal():
                _tighten(found, name, int(value))
