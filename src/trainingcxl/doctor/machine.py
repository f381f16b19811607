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

__all__ = ["cgroup_limits", "cpu", "dirty_limits", "memory", "read_text", "versions"]

PROC, SYS = Path("/proc"), Path("/sys")

_CPU_FLAGS = ("sse4_2", "avx2", "avx512f", "clflush", "clflushopt", "clwb")
_FLUSHES = ("clwb", "clflushopt", "clflush")  # the order in which the engine prefers them
_ENVIRONMENT = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "TRAININGCXL_FLUSH")
_UNLIMITED = 1 << 60  # cgroup v1 writes "no limit" as a number that no machine has


def read_text(path: Path) -> str | None:
    """Return a small file's text, stripped; None if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


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


def memory(proc: Path = PROC) -> dict[str, int | None]:
    """Return bytes of memory: all, and what can be had without swapping."""
    fields = {}
    for line in (read_text(proc / "meminfo") or "").splitlines():
        key, _, value = line.partition(":")
        fields[key] = value.split()
    return {
        name: int(fields[key][0]) << 10 if key in fields else None
        for name, key in (("total_bytes", "MemTotal"), ("available_bytes", "MemAvailable"))
    }


def dirty_limits(available_bytes: int | None, proc: Path = PROC) -> dict[str, int | float | None]:
    """Return when the kernel writes changed pages back (vm.dirty_*).

    Args:
        available_bytes: Memory that the ratios are taken of.
        proc: Root of /proc.

    Returns:
        The sysctls by name, and what they come to: bytes from which write-back starts, bytes from
        which writers wait for it, and seconds after which a changed page is written in any case.
    """
    names = (
        "dirty_background_ratio", "dirty_ratio", "dirty_background_bytes", "dirty_bytes",
        "dirty_expire_centisecs", "dirty_writeback_centisecs",
    )  # fmt: skip
    found: dict[str, int | float | None] = {name: _number(proc / "sys/vm" / name) for name in names}

    def threshold(kind: str) -> int | None:
        bytes_set, ratio = found[f"{kind}bytes"], found[f"{kind}ratio"]
        if bytes_set:
            return int(bytes_set)
        if ratio is None or available_bytes is None:
            return None
        return int(available_bytes * ratio / 100)

    expire = found["dirty_expire_centisecs"]
    return {
        **found,
        "write_back_from_bytes": threshold("dirty_background_"),
        "writers_wait_from_bytes": threshold("dirty_"),
        "written_after_s": None if expire is None else expire / 100,
    }


def _number(path: Path) -> int | None:
    text = read_text(path)
    return int(text) if text is not None and text.isdecimal() else None


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
    _tighten(found, "memory_bytes", _number(folder / "memory.max"))
    _tighten(found, "memory_high_bytes", _number(folder / "memory.high"))
    _first(found, "memory_used_bytes", _number(folder / "memory.current"))
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
    _tighten(found, "memory_bytes", _number(folder / "memory.limit_in_bytes"))
    _first(found, "memory_used_bytes", _number(folder / "memory.usage_in_bytes"))


def _cpu_v1(folder: Path, device: str | None, found: dict[str, Any]) -> None:
    quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
    if quota and period:  # a quota of -1 is none, and no number here
        _tighten(found, "cpus", quota / period)


def _blkio_v1(folder: Path, device: str | None, found: dict[str, Any]) -> None:
    for name, file in (("write_bytes_per_s", "bps"), ("writes_per_s", "iops")):
        text = read_text(folder / f"blkio.throttle.write_{file}_device") or ""
        for line in text.splitlines():
            disk, _, value = line.partition(" ")
            if disk == device and value.isdecimal():
                _tighten(found, name, int(value))
